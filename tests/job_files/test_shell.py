"""A shell script is read as bash reads it: what it would start, with which words."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.job_files.reading.argv import Argv
from loadgauge.job_files.reading.shell import Shell

VARIABLES = """
NAME=plain
QUOTED="two words"
export DIR=${DIR:-"${HOMES:-/data}/verl"}
MODEL=${MODEL:-${DIR}/Qwen3-32B}
N=${N:-$((1024 * 8))}
M=$((N / 3 + 2 * (N - 1) % 7))
NEGATIVE=${NEGATIVE:--1}
SUM=$((
    N + M
))
CHAIN=${FIRST:-${SECOND:-${NAME}-x}}
HALF=$(expr 32 / 4 / 2)
EMPTY=
BASE=$(basename /models/qwen3.sh .sh)
UPPER=${NAME^^}
CUT=${MODEL##*/}
STEM=${MODEL%/*}
SLASHED=${MODEL//\\//_}
PLUS=${NAME:+set}
FOLDER=$(dirname /a/b/c)
"""
NAMES = [line.split("=")[0].split()[-1] for line in VARIABLES.splitlines() if "=" in line and "EMPTY" not in line]
SCRIPTS = {
    "arrays": 'A=(--x 1 "two words")\nA+=(--y\n  2)\nrun "${A[@]}" ${A[1]} ${#A[@]} "${A[@]:1:2}"',
    "strings": 'OPTS=" --x 1 \\\n  --y 2 "\nrun $OPTS --z "$OPTS"',
    "branches": 'if [ -z "$TP" ]; then TP=2; elif [ 1 = 1 ]; then TP=3; fi\n[[ $TP -gt 1 && "$X" != y ]] && SP=--sp\nrun $TP $SP',
    "else": 'N=3\nif (( N )) && [ $N -lt 2 ]; then run small; else run large; fi',
    "case": 'SIZE=8b\ncase "$SIZE" in\n 1b|2b) L=16 ;;\n 8*) L=32 ;;\n *) exit 1 ;;\nesac\nrun --layers $L',
    "functions": 'launch() {\n  local n=${2:-4}\n  run --name $1 -n $n "${@:2}"\n}\nlaunch a\nfunction f { run "$#"; }\nf x y',
    "defaults": 'run ${A:-1} ${B-2} "${C:-x y}" ${D:=3} $D ${E:+4} $((D * 2))',
    "read": 'IFS=, read -r A B <<< "4,2"\nrun $A $B',
    "pairs": 'run a && run b || run c; false || run d',
    "comments": 'run --a 1 # --b 2\n# run --c\nrun "#" a#b',
    "here": 'cat > /dev/null <<EOF\nrun not this\nEOF\nrun "after" <<< "x" > /dev/stdout',
    "read a document": "read -r -d '' X <<'EOF' || true\nrun --a \"x\" 'b c'\nEOF\neval \"$X\"",
    "cat a document": 'N=2\nX=$(cat <<EOF\nrun --a "$N"\nEOF\n)\neval "$X"',
    "function of another script": 'eval "launch() { run --a \\$1; }"\nlaunch 3',
    "exec": "exec 2>/dev/null\nrun after",
    "eval": 'CMD="run --a \'x y\'"\nCMD="$CMD --b 2"\neval $CMD',
    "eval of lines": 'CMD="run --a 1\n  --b 2\n"\neval $CMD',
    "range": "for i in {2..2}; do run $i; done",
    "substitution": 'A="$(echo "a  b" | tr "a" "a")"\nD="$(cd "/tmp" && pwd)"\nrun "$D" `dirname /x/y`',
    "quotes": "run 'a $B' \"c \\\"d\\\"\" e\\ f --j='{\"k\": 1}'",
    "loop": 'for x in 1; do run $x; done\nwhile [ $# -gt 0 ]; do shift; done\nuntil true; do run never; done',
    "set": 'set -- 5 6\nrun $1 "$@" "$*"\nshift\nrun $1',
}  # fmt: skip
BASH = pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")


def by_bash(script: str) -> list[str]:
    """The lines that bash prints for a script in which `run` prints its words."""
    head = "run() { printf '<%s>\\n' \"$@\"; }\n"
    done = subprocess.run(
        ["bash", "-c", head + script], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"}
    )
    return done.stdout.splitlines()


@BASH
def test_variables_are_those_of_bash() -> None:
    ours = Shell(VARIABLES).variables
    assert [f"<{ours[name]}>" for name in NAMES] == by_bash(VARIABLES + "".join(f'run "${name}"\n' for name in NAMES))


@BASH
@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str) -> None:
    ours = [f"<{word.text}>" for command in Shell(SCRIPTS[name]).commands for word in command[1:]]
    if name == "strings":  # a quoted list of options is one word for bash, which no program takes
        assert ours[:5] == by_bash(SCRIPTS[name])[:5]
    else:
        assert ours == by_bash(SCRIPTS[name])


def test_what_is_only_known_where_it_runs_keeps_its_dollar_sign() -> None:
    script = (
        "A=$SLURM_NNODES\nB=${TP}\nC=$((A * 2))\nD=$(date)\nE=$((1 / 0))\nF=$((9 ** 9))\nG=$((10 * 999999999999))\n"
    )
    assert Shell(script).variables == {}
    (command,) = Shell("run --nodes $SLURM_NNODES --tp ${TP} --x $((A * 2))").commands
    assert [word.text for word in command] == ["run", "--nodes", "$SLURM_NNODES", "--tp", "${TP}", "--x", "$((A * 2))"]


def test_what_it_is_started_with_is_set() -> None:
    script = "TP=$1\nPP=${PP:-2}\nDP=4\nrun $TP $PP $DP"
    assert [word.text for word in Shell(script, {"1": "8", "PP": "3", "DP": "9"}).commands[0]] == ["run", "8", "3", "4"]
    assert [word.text for word in Shell(script, {"TP": "8"}).commands[0]] == ["run", "8", "2", "4"]


def test_branches_that_give_up_are_not_taken() -> None:
    script = (
        'if [ $# -lt 1 ]; then echo "usage"; exit 1; fi\n[ -n "$1" ] || exit 1\n'
        "case $MODEL in\n small) L=2 ;;\n large) L=4 ;;\n *) echo unknown; exit 1 ;;\nesac\nrun --layers $L --model $MODEL\n"
    )
    shell = Shell(script)
    assert [word.text for word in shell.commands[-1]] == ["run", "--layers", "2", "--model", "small"]
    assert shell.notes == ["$MODEL is set nowhere; its first choice, small, is read"]
    assert [word.text for word in Shell(script, {"MODEL": "large"}).commands[-1]][2] == "4"


def test_of_a_loop_the_first_round_is_read_and_said() -> None:
    shell = Shell('for config in "2,4" "4,2"; do IFS=, read TP PP <<< "$config"; run $TP $PP; done')
    assert [word.text for word in shell.commands[0]] == ["run", "2", "4"]
    assert shell.notes == ["config goes through 2 values; the first, 2,4, is read"]


def test_scripts_beside_it_are_read_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text("MODEL_ARGS=(--num-layers 2)\n")
    (tmp_path.parent / "outside.sh").write_text("MODEL_ARGS=(--num-layers 9)\n")
    script = (
        'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nsource "$HERE/models/small.sh"\nrun "${MODEL_ARGS[@]}"\n'
    )
    file = str(tmp_path / "run.sh")
    here = Shell('. `pwd`/models/small.sh\nrun "${MODEL_ARGS[@]}"', file=file)
    assert [word.text for word in here.commands[0]] == ["run", "--num-layers", "2"]
    assert [word.text for word in Shell(script, file=file).commands[0]] == ["run", "--num-layers", "2"]
    outside = Shell('source ../outside.sh\nrun "${MODEL_ARGS[@]}"', file=file)
    assert [word.text for word in outside.commands[0]] == ["run"]
    assert outside.notes == ["../outside.sh is not there, so what it sets is not known"]


def test_documents_that_a_script_writes_are_kept() -> None:
    shell = Shell("N=2\ncat > config.yaml <<EOF\nlayers: $N\nEOF\ncat <<'END' > raw.yaml\na: $N\nEND\n")
    assert shell.documents["config.yaml"] == "layers: 2\n"


COMMANDS = {
    "uv run --frozen --env-file x torchrun --nproc_per_node 8 t.py --bf16": ("nproc_per_node", "bf16"),
    "srun --nodes 2 bash -c 'python train.py --a 1'": ("a",),
    "ray start --head --num-gpus 8\nray job submit --address=x -- python3 train.py --a 1": ("a",),
    "pip install --upgrade x\npython convert.py --in a\npython -m x.train --a 1\npython eval.py --b": ("a",),
    "python train.py \\\n  --a 1 \\\n  # --b 2 \\\n  --c 3": ("a", "c"),
    "MODEL_ARGS=(--a 1\n  --b)": ("a", "b"),
    "--a 1\n--b 2": ("a", "b"),
    "ARGS='--a 1 --b 2 --c'\nsbatch --nodes=2 run.sbatch": ("a", "b", "c"),  # which the script that is started has
    "X=1 env Y=2 nohup python train.py --a 1 > log 2>&1 &": ("a",),
    'ARGS="--a 1"\nexec torchrun train.py $ARGS ${EXTRA_ARGS} "$@"': ("a",),
}


@pytest.mark.parametrize("script", COMMANDS)
def test_the_command_that_trains(script: str) -> None:
    assert Argv(script).names() == COMMANDS[script]


def test_a_program_behind_its_launchers_options_is_no_training_by_its_own_name() -> None:
    line = "torchrun --nproc_per_node 1 --nnodes 1 --node_rank 0 --master_port 6000 tools/run_server.py --a 1"
    assert Argv(line).idle == "tools/run_server.py"


def test_a_patch_goes_where_the_option_is_written() -> None:
    script = 'TP=2\nOPTS="--tp $TP \\\n --bf16"\nCMD="python train.py $OPTS"\neval "$CMD"\n'
    document = Argv(script)
    document.put("tp", 4)
    document.drop("bf16")
    assert Argv(document.text()).get("tp") == "4"
    assert Argv(document.text()).names() == ("tp",)
    assert document.text().startswith('TP=2\nOPTS="--tp 4')


@pytest.mark.parametrize(
    "script",
    [
        "f() { f; f; }\nf", "A=x\n" + "A=$A$A\n" * 60, "if " * 500, "(" * 500, "case x in " * 300, '"' * 999, "${" * 999,
        "$(" * 999, "for x in a; do " * 200, "a=(" * 500, "<<E\n" * 500, "eval " * 300, 'X="eval \\$X"\neval $X',
    ],
)  # fmt: skip
def test_a_hostile_script_is_read_or_refused(script: str) -> None:
    with suppress(ConfigError):
        Shell(script)


NPU = """DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
case "${DEVICE}" in
    gpu) use=0.6 ;;
    npu) use=0.5 ;;
esac
if [ "${DEVICE}" = npu ]; then
    run --moved $use
else
    run --stays $use
fi
"""


def test_a_test_for_another_makers_cards_fails() -> None:
    shell = Shell(NPU)
    assert [word.text for word in shell.commands[0]] == ["run", "--stays", "0.6"]
    assert not shell.notes
    assert [word.text for word in Shell(NPU, {"DEVICE": "npu"}).commands[0]] == ["run", "--moved", "0.5"]


def test_what_a_case_takes_for_granted_holds_after_it() -> None:
    shell = Shell(NPU.replace("import torch_npu", "import other"))
    assert [word.text for word in shell.commands[0]] == ["run", "--stays", "0.6"]
    assert len(shell.notes) == 1


def test_words_after_a_sourced_script_are_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "one.sh").write_text('SIZE=${1}\nif [[ ${1} != "slurm" ]]; then\n  torchrun one.py\nfi\n')
    for words, programs in (("", ["one.py", "two.py"]), (" slurm", ["two.py"])):
        commands = Shell(f"source ./one.sh{words}\ntorchrun two.py $SIZE\n", file=str(tmp_path / "run.sh")).commands
        assert [command[1].text for command in commands] == programs
        assert [word.text for word in commands[-1][2:]] == (["slurm"] if words else ["${1}"])


@pytest.mark.parametrize("value", ["server", "merge", "rollout"])
@pytest.mark.parametrize("place", range(3, 7))
def test_a_value_of_an_option_is_no_program(value: str, place: int) -> None:
    """Whatever place among the words it has, a command that trains is one."""
    before = [f"--option{index} value" for index in range(place - 2)]
    line = Argv(f"swift rlhf {' '.join(before)} --vllm_mode {value} --max_length 512\n")
    assert (line.idle, line.get("vllm_mode")) == ("", value)
