# docker build -t loadgauge .
# docker run --rm loadgauge estimate llama-3.1-8b --gpu h100 --gpus 8 --zero 3
# docker run --rm -v "$PWD:/jobs" loadgauge check job.yaml        (files are read from /jobs)
# docker run --rm --network host loadgauge serve                  (the page listens on 127.0.0.1 only)
FROM python:3.13-slim AS build
WORKDIR /source
RUN pip install --no-cache-dir build
COPY . .
RUN python -m build --wheel --outdir /wheels

FROM python:3.13-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[web,plot]" && rm -rf /wheels && useradd --create-home gauge
USER gauge
WORKDIR /jobs
ENTRYPOINT ["loadgauge"]
