# docker build -t loadgauge .
# docker run --rm loadgauge estimate llama-3.1-8b --gpu h100 --gpus 8 --zero 3
# docker run --rm -v "$PWD:/jobs" loadgauge check job.yaml        (files are read from /jobs)
# docker run --rm --network host loadgauge serve --no-browser      (the page listens on 127.0.0.1 only; in Docker Desktop: enable host networking)
# docker run --rm -i loadgauge mcp                                 (for assistants)
FROM python:3.13-slim AS build
WORKDIR /source
RUN pip install --no-cache-dir build
COPY . .
RUN python -m build --wheel --outdir /wheels

FROM python:3.13-slim
# Mounted, as a copy would stay in a layer; the folder is the user's, who writes files there (--html run.html) where nothing is mounted.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/*.whl)[web,plot,mcp]" && useradd --create-home gauge && install -d -o gauge /jobs
USER gauge
WORKDIR /jobs
ENTRYPOINT ["loadgauge"]
