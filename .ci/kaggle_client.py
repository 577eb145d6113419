"""Kaggle's own client on a bundle, up to its first request, of which none is sent: `kaggle_client.py BUNDLE`.

The client reads and checks the metadata and collects the files before it asks the server for anything. It
comes with `pip install kaggle six` (it needs six without saying so); no account is needed.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"KAGGLE_USERNAME": "somebody", "KAGGLE_KEY": "0" * 32}

from kaggle.api.kaggle_api_extended import KaggleApi
from requests import HTTPError


class RequestError(Exception):
    """The client would now send a request."""

    def __init__(self, name: str, request: Any) -> None:
        super().__init__(name)
        self.name, self.request = name, request


class Service:
    """Stands for the client's connection and for every service in it."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> "Service":
        return Service(f"{self.name}.{name}".strip("."))

    def __call__(self, request: Any = None) -> None:
        raise RequestError(self.name, request)


def offline_client(uploads: list[list[str]]) -> KaggleApi:
    """A client without a server: no dataset is there yet, and files to upload are only listed."""

    def upload(request: Any, resources: Any, folder: str, *_: object) -> None:
        uploads.append(sorted(path.name for path in Path(folder).iterdir()))

    def absent(dataset: str) -> None:
        raise HTTPError(dataset)

    api = KaggleApi()
    api.config_values["username"] = "somebody"
    api.build_kaggle_client = lambda *_, **__: Service()
    api.with_retry = lambda function: function
    api.upload_files, api.dataset_status = upload, absent
    return api


def main(bundle: Path) -> None:
    uploads: list[list[str]] = []
    api = offline_client(uploads)
    steps = [
        (api.dataset_create_new, "dataset", "create_dataset"),
        (api.model_create_new, "model", "create_model"),
        (api.model_instance_create, "model", "create_model_instance"),
        (api.kernels_push, "infer_kernel", "save_kernel"),
        (api.kernels_push, "train_kernel", "save_kernel"),
    ]
    for call, folder, request in steps:
        try:
            call(str(bundle / folder))
        except RequestError as stop:
            if not stop.name.endswith(f".{request}"):
                raise SystemExit(f"{folder}: the client asks for {stop.name} instead of {request}.") from stop
            if request == "save_kernel":
                check_kernel(folder, stop.request)
            print(f"{folder}: ready for {request}")
        else:
            raise SystemExit(f"{folder}: the client refuses it, see above.")
    if not any(name.endswith(".whl") for name in uploads[0]) or "embedder.keras" not in uploads[1]:
        raise SystemExit(f"the uploads lack the wheel or the model: {uploads}.")


def check_kernel(folder: str, request: Any) -> None:
    """What the server would be told of a kernel."""
    told = {name: getattr(request, name) for name in ("enable_internet", "enable_gpu", "machine_shape")}
    if told != {"enable_internet": False, "enable_gpu": True, "machine_shape": "NvidiaTeslaT4"}:
        raise SystemExit(f"{folder}: the server would be told {told}.")
    if not request.dataset_data_sources or not request.competition_data_sources or not request.text:
        raise SystemExit(f"{folder}: the server would be told of no sources or no code.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
