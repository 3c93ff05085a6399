"""The package's server program for pictures, with a real diffusers pipeline that is tiny and has random weights."""

import base64
import importlib.util
import json
import socket
import urllib.error
import urllib.request

import pytest

from gpu_runtime.backends.engines.backend import claim, ports
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.errors import LoadFailed, NotAModel
from gpu_runtime.facts import ModelSpec, Share
from gpu_runtime.settings import Settings
from tests.clock import PATIENCE
from tests.worlds import footprint

if not importlib.util.find_spec("diffusers"):  # importing it takes each worker a second
    pytest.skip(
        "diffusers is not installed: pip install 'gpu-console[diffusion]'", allow_module_level=True
    )
pytest.importorskip("fastapi", reason="fastapi is not installed: pip install 'gpu-console[serve]'")
PNG = b"\x89PNG"


def tiny_pipeline(directory):
    """A Stable Diffusion pipeline of about 100,000 random weights for pictures of 32 × 32 pixels."""
    import torch
    from diffusers import (
        AutoencoderKL,
        DDIMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    words = directory.with_name("words")
    words.mkdir()
    signs = [chr(code) for code in range(97, 123)]
    vocabulary = [*signs, *(sign + "</w>" for sign in signs), "<|startoftext|>", "<|endoftext|>"]
    (words / "vocab.json").write_text(
        json.dumps({word: number for number, word in enumerate(vocabulary)})
    )
    (words / "merges.txt").write_text("#version: 0.2\n")
    start, end = len(vocabulary) - 2, len(vocabulary) - 1
    unet = dict(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, norm_num_groups=8
    )
    unet |= dict(block_out_channels=(8, 16), cross_attention_dim=16, attention_head_dim=4)
    unet |= dict(down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"))
    unet |= dict(up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))
    vae = dict(in_channels=3, out_channels=3, latent_channels=4, norm_num_groups=8)
    vae |= dict(block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2)
    vae |= dict(up_block_types=("UpDecoderBlock2D",) * 2)
    text = dict(vocab_size=len(vocabulary), hidden_size=16, intermediate_size=16)
    text |= dict(num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16)
    text |= dict(bos_token_id=start, eos_token_id=end, pad_token_id=end)
    files = (str(words / "vocab.json"), str(words / "merges.txt"))
    steps = dict(clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    StableDiffusionPipeline(
        unet=UNet2DConditionModel(**unet),
        vae=AutoencoderKL(**vae),
        text_encoder=CLIPTextModel(CLIPTextConfig(**text)),
        tokenizer=CLIPTokenizer(*files, model_max_length=16),
        scheduler=DDIMScheduler(num_train_timesteps=10, **steps),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(directory)
    return directory


def test_a_part_that_lacks_a_tensor_is_not_painted_with(tmp_path):
    """It would have random values. The program ends with the name of the tensor."""
    from safetensors.torch import load_file, save_file

    path = tiny_pipeline(tmp_path / "tiny")
    weights = path / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    del tensors["conv_out.weight"]
    save_file(tensors, weights, {"format": "pt"})
    backend = open_backend("diffusers", open_probe("sim:64MiB,host:64MiB"))
    for options, why in (({}, "conv_out.weight"), ({"allow_missing": True}, "")):
        spec = ModelSpec("p", "diffusers", source=str(path), options=options)
        share = (Share("sim:0", footprint(backend, spec).bytes),)
        if why:
            with pytest.raises(LoadFailed, match=why):
                backend.load(spec, share)
        else:
            backend.drop(backend.load(spec, share))


@pytest.mark.parametrize("where", ["pipeline", "unet", "text_encoder"])
def test_code_of_a_pipelines_directory_does_not_run(tmp_path, where):
    path = tiny_pipeline(tmp_path / "tiny")
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit('it ran')"
    index = json.loads((path / "model_index.json").read_text())
    if where == "pipeline":
        index["_class_name"] = ["own", "Own"]
        (path / "own.py").write_text(code)
    elif where == "unet":
        index["unet"] = ["own", "Own"]
        (path / "unet" / "own.py").write_text(code)
    else:
        index["text_encoder"] = ["transformers", "AutoModel"]
        config = json.loads((path / "text_encoder" / "config.json").read_text())
        config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModel": "own.M"}}
        (path / "text_encoder" / "config.json").write_text(json.dumps(config))
        (path / "text_encoder" / "own.py").write_text(code)
    (path / "model_index.json").write_text(json.dumps(index))
    backend = open_backend("diffusers", open_probe("sim:64MiB,host:64MiB"))
    spec = ModelSpec("p", "diffusers", source=str(path))
    with pytest.raises(LoadFailed):
        backend.load(spec, (Share("sim:0", footprint(backend, spec).bytes),))
    assert not (tmp_path / "ran").exists()


def linger_on_the_first_free_port():
    """Leaves a closed connection on the first free port, as an ended engine does for a minute."""
    port = claim(ports(Settings.load().gpu_engine_ports), "painter")
    port.close()
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port.number))
        server.listen()
        with socket.create_connection(("127.0.0.1", port.number)) as client:
            accepted, _ = server.accept()
            accepted.close()
            client.recv(1)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The pipeline's server, loaded once for all tests in this file."""
    path = tiny_pipeline(tmp_path_factory.mktemp("diffusion") / "tiny")
    backend = open_backend("diffusers", open_probe("sim:64MiB,host:64MiB"))
    spec = ModelSpec("painter", "diffusers", source=str(path), model_type="diffusion")
    found = footprint(backend, spec)
    files = sum(file.stat().st_size for file in path.glob("*/*.safetensors"))
    assert found.bytes == pytest.approx(files * 1.3, abs=2) and found.parts[0].source == "file size"
    linger_on_the_first_free_port()
    loaded = backend.load(spec, (Share("sim:0", found.bytes),))
    yield backend.value(loaded)
    backend.drop(loaded)
    assert backend.probe.used()["sim:0"] == 0


def post(served, path, body, headers=None):
    """Sends a request. Returns the HTTP status and the JSON answer."""
    request = urllib.request.Request(
        served.base_url.removesuffix("/v1") + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **(served.headers if headers is None else headers)},
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def draw(served, **words):
    status, said = post(
        served, "/v1/images/generations", {"prompt": "a fox", "steps": 2, "size": "32x32", **words}
    )
    return status, [
        base64.b64decode(one["b64_json"]) for one in said["data"]
    ] if status == 200 else said["detail"]


def test_pictures_have_the_form_of_openai_s_api(served):
    """The same seed gives the same picture, and another seed gives another picture."""
    status, pictures = draw(served, seed=1, n=2)
    assert status == 200
    assert len(pictures) == 2
    assert all(picture.startswith(PNG) for picture in pictures)
    assert draw(served, seed=1, n=2)[1] == pictures and draw(served, seed=2, n=2)[1] != pictures
    wanted = {"prompt": "a fox", "num_inference_steps": 1, "width": 32, "height": 32}
    status, said = post(served, "/generate", wanted)
    assert status == 200 and base64.b64decode(said["images"][0]).startswith(PNG)
    assert post(served, "/generate", {"promt": "a fox"}) == (
        422,
        {"detail": "this pipeline has no parameter promt"},
    )
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert post(served, "/v1/images/generations", {"prompt": "a fox"}, headers)[0] == 401


@pytest.mark.parametrize(
    "words",
    [
        {"prompt": ""},
        {"prompt": 3},
        {"n": 11},
        {"n": True},
        {"size": "32"},
        {"size": "99999x99999"},
        {"steps": 0},
        {"steps": "many"},
        {"num_inference_steps": 0},
        {"response_format": "url"},
        {"size": "33x32"},
    ],
)
def test_an_invalid_request_is_refused_with_a_reason(served, words):
    status, said = draw(served, **words)
    assert status in (400, 422) and said


def test_a_directory_without_a_pipeline_is_refused(tmp_path):
    backend = open_backend("diffusers", open_probe("sim:64MiB,host:64MiB"))
    with pytest.raises(NotAModel, match="has no model_index.json"):
        backend.evidence(ModelSpec("painter", "diffusers", source=str(tmp_path)))
