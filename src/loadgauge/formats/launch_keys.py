"""Options of what starts a job: torchrun, `accelerate launch`, deepspeed, Slurm and containers."""

from __future__ import annotations

from loadgauge.formats.coverage import Coverage, stops, words

LAUNCH = Coverage(
    source="torchrun --help, accelerate launch --help, deepspeed --help, man sbatch, docker run --help",
    harmless=words(
        """
        nproc_per_node nnodes node_rank master_addr master_port rdzv_backend rdzv_endpoint rdzv_id rdzv_conf tee role m
        local_addr local_ranks_filter config_file log_dir redirects standalone max_restarts monitor_interval run_path
        no_python start_method module logs_specs event_log_handler duplicate_stdout_filters duplicate_stderr_filters

        machine_rank main_process_ip main_process_port main_training_function multi_gpu same_network gpu_ids debug quiet
        num_cpu_threads_per_process enable_cpu_affinity deepspeed_hostfile hostfile include exclude launcher ssh_port
        no_ssh_check force_multi save_pid enable_each_rank_log bind_cores_to_rank

        job_name partition account qos time output error nodes ntasks ntasks_per_node gpus_per_node gpus_per_task gres
        cpus_per_task mem exclusive wait kill_on_bad_exit container_image container_mounts container_name
        container_workdir no_container_mount_home export mail_type mail_user signal dependency array requeue open_mode
        label nodelist overlap cpu_bind mpi constraint

        rm name gpus ipc network shm_size ulimit volume workdir env env_file runtime privileged entrypoint
        """
    ),
    stops=stops(
        ("is an option of `accelerate launch` that its configuration file says as well; give it in that file",
         (False, "no"), "use_deepspeed use_fsdp use_megatron_lm mixed_precision dynamo_backend zero_stage"),
    ),
)  # fmt: skip
