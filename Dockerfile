# greedynas on a CPU. Build it in a checkout:
#   docker build -t greedynas .
#   docker run --rm --shm-size 2g -v "$PWD:/work" --user "$(id -u):$(id -g)" greedynas run auto --data photos/ --flops 5M --out runs/photos
FROM python:3.12-slim-bookworm AS build

WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY greedynas greedynas
RUN python -m venv /opt/greedynas \
    && /opt/greedynas/bin/pip install --no-cache-dir -c constraints.txt torch torchvision --index-url https://download.pytorch.org/whl/cpu \
    && /opt/greedynas/bin/pip install --no-cache-dir -c constraints.txt .

FROM python:3.12-slim-bookworm

COPY --from=build /opt/greedynas /opt/greedynas
ENV PATH=/opt/greedynas/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 runner
USER 1000
WORKDIR /work
ENTRYPOINT ["greedynas"]
CMD ["--help"]
