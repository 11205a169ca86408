"""The tokens, positions and attention ranges of prompts with images equal those of transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForImageTextToText, Gemma3TextConfig, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.scheduling.prompt_images import ImageTraits, PromptImages, mrope_positions
from helexa.neuron.vision.image_tokens_and_errors import ImageLayout, ImageRange, expanded_tokens
from helexa.neuron.vision.model_vision import image_text
from helexa.neuron.vision.processor_choice import image_layout, image_processor
from local_tokenizers import from_directory
from neuron.vision.images import noise
from reference.vision_models import MODELS

SIZES = [(64, 64), (200, 120), (33, 250), (300, 300)]
FAKE = "<fake_token_around_image>"
CONTROL = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<start_of_image>", "<image_soft_token>"]
CONTROL += ["<|image|>", "<|image>", "<image|>"]
CONTROL += ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
CONTROL += ["<end_of_image>", FAKE, "<image>", "<global-img>", *(f"<row_{i}_col_{j}>" for i in "123" for j in "123")]

Texts = Callable[[Sequence[Image.Image]], list[str]]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a tokenizer whose tokens are the bytes, a few pairs of bytes, and the control tokens of images."""
    vocab = {text: index for index, text in enumerate(sorted(ByteLevel.alphabet()))}
    merges = [("Ċ", "Ċ"), ("Ġ", "a")]
    vocab |= {first + second: len(vocab) + index for index, (first, second) in enumerate(merges)}
    backend = tokenizers.Tokenizer(BPE(vocab, merges))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(CONTROL)
    folder = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    return folder


def qwen(processor: type[Qwen3VLProcessor | Qwen2_5_VLProcessor], patch_size: int) -> Texts:
    preprocessing = Qwen2VLImageProcessorPil(
        patch_size=patch_size, size={"shortest_edge": 4096, "longest_edge": 65536}, merge_size=2
    )

    def texts(images: Sequence[Image.Image]) -> list[str]:
        inputs: Any = preprocessing(list(images), return_tensors="pt")
        self: Any = SimpleNamespace(image_processor=preprocessing, image_token="<|image_pad|>")
        return [processor.replace_image_token(self, inputs, index) for index in range(len(images))]

    return texts


def tiled(processor: type[Idefics3Processor | SmolVLMProcessor], preprocessing: Any) -> Texts:
    def texts(images: Sequence[Image.Image]) -> list[str]:
        inputs: Any = preprocessing([list(images)], return_row_col_info=True)
        self: Any = SimpleNamespace(
            fake_image_token=FAKE,
            image_token="<image>",
            global_image_tag="<global-img>",
            global_image_token="<global-img>",
            image_seq_len=16 if processor is Idefics3Processor else 4,
        )
        return [processor.replace_image_token(self, inputs, index) for index in range(len(images))]

    return texts


def gemma3(images: Sequence[Image.Image]) -> list[str]:
    inputs: Any = Gemma3ImageProcessorPil(size={"height": 112, "width": 112})(list(images))
    sequence = f"\n\n<start_of_image>{'<image_soft_token>' * 16}<end_of_image>\n\n"
    self: Any = SimpleNamespace(full_image_sequence=sequence)
    return [Gemma3Processor.replace_image_token(self, inputs, index) for index in range(len(images))]


def gemma4(images: Sequence[Image.Image]) -> list[str]:
    inputs: Any = Gemma4ImageProcessorPil(max_soft_tokens=70)(list(images))
    self: Any = SimpleNamespace(boi_token="<|image>", eoi_token="<image|>", image_token="<|image|>")
    return [Gemma4Processor.replace_image_token(self, inputs, index) for index in range(len(images))]


def pixtral(token: int) -> Texts:
    """Return what `PixtralProcessor.replace_image_token` returns. Its module requires torchvision.

    `token` is the height and the width of a token in pixels.
    """

    def texts(images: Sequence[Image.Image]) -> list[str]:
        sizes = PixtralImageProcessorPil(size={"longest_edge": 140}, patch_size=token)(list(images))["image_sizes"]
        rows = [["[IMG]" * (width // token)] * (height // token) for height, width in sizes]
        return ["[IMG_BREAK]".join(texts) + "[IMG_END]" for texts in rows]

    return texts


QWEN_SETTINGS = {"size": {"shortest_edge": 4096, "longest_edge": 65536}}
IDEFICS3: dict[str, Any] = {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 112}}
SMOLVLM: dict[str, Any] = {"size": {"longest_edge": 192}, "max_image_size": {"longest_edge": 96}}
CASES: dict[str, tuple[dict[str, Any], Texts]] = {
    "qwen3_5": (QWEN_SETTINGS, qwen(Qwen3VLProcessor, 16)),
    "qwen3_5_moe": (QWEN_SETTINGS, qwen(Qwen3VLProcessor, 16)),
    "qwen3_vl": (QWEN_SETTINGS, qwen(Qwen3VLProcessor, 16)),
    "qwen2_5_vl": (QWEN_SETTINGS, qwen(Qwen2_5_VLProcessor, 14)),
    "gemma3": ({}, gemma3),
    "gemma4": ({"max_soft_tokens": 70}, gemma4),
    "llava": ({}, pixtral(14)),
    "mistral3": ({}, pixtral(28)),
    "idefics3": (IDEFICS3, tiled(Idefics3Processor, Idefics3ImageProcessorPil(**IDEFICS3))),
    "smolvlm": (SMOLVLM, tiled(SmolVLMProcessor, SmolVLMImageProcessorPil(**SMOLVLM))),
}


def config(model_type: str) -> dict[str, Any]:
    return AutoConfig.for_model(model_type, **MODELS[model_type]).to_dict()


def layouts_of(model_type: str, preprocessor: dict[str, Any]) -> list[ImageLayout]:
    processor = image_processor(config(model_type), preprocessor)
    return [image_layout(processor, *size, 1 << 20) for size in SIZES]


@pytest.mark.parametrize("model_type", CASES)
def test_tokens_of_prompts_with_images_equal_those_of_transformers(model_type: str, tokenizer_folder: Path) -> None:
    preprocessor, reference = CASES[model_type]
    syntax, layouts = image_text(model_type), layouts_of(model_type, preprocessor)
    prompt = "an image: IMAGE\n\nIMAGEIMAGE a text IMAGE\n".replace("IMAGE", syntax.placeholder)
    tokenizer = from_directory(tokenizer_folder)
    image_token = tokenizer.token_id(syntax.image_token)
    assert image_token is not None
    tokens, ranges = expanded_tokens(tokenizer.encode(syntax.expanded(prompt, layouts)), image_token, layouts)

    first, *rest = prompt.split(syntax.placeholder)
    texts = reference([noise(*size) for size in SIZES])
    expected = first + "".join(text + after for text, after in zip(texts, rest, strict=True))
    hf_tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_folder / "tokenizer.json"))
    assert tokens == hf_tokenizer(expected, add_special_tokens=False).input_ids

    marked = [place for image_range in ranges for place in range(image_range.start, image_range.end)]
    assert marked == [place for place, token in enumerate(tokens) if token == image_token]
    for image, layout in enumerate(layouts):
        rows = [
            row
            for image_range in ranges
            if image_range.image == image
            for row in range(image_range.first, image_range.first + image_range.length)
        ]
        assert rows == list(range(layout.tokens))


@pytest.mark.parametrize(
    "order",
    [[], [0], [1], [None, 0], [1, None], [0, None, 1, 2, None, None, 3, 2], [None] * 5],
    ids=lambda order: "-".join("t" if part is None else str(part) for part in order) or "empty",
)
@pytest.mark.parametrize("model_type", [name for name in CASES if name.startswith("qwen")])
def test_positions_of_text_and_images_equal_those_of_transformers(model_type: str, order: list[int | None]) -> None:
    """Prompts of texts (None) with three tokens each, and of images (indices of `SIZES`)."""
    available = layouts_of(model_type, CASES[model_type][0])
    layouts = [available[part] for part in order if part is not None]
    types, ranges = [], []
    for part in order:
        if part is None:
            types += [0] * 3
            continue
        if types and types[-1] == 1:
            types.append(0)  # transformers finds images by their type, so two images must not touch
        length = available[part].tokens
        ranges.append(ImageRange(len(ranges), 0, len(types), length))
        types += [1] * length
    result = mrope_positions(len(types), ranges, layouts, 2)
    assert result.positions.shape == (3, len(types))
    if not types:
        assert result.delta == 0
        return
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(model_type, **MODELS[model_type])).model
    grids = torch.tensor([(1, *layout.tiles[0]) for layout in layouts]) if layouts else None
    positions, delta = model.get_rope_index(
        torch.zeros(1, len(types), dtype=torch.int64), torch.tensor([types], dtype=torch.int32), image_grid_thw=grids
    )
    np.testing.assert_array_equal(result.positions, positions[:, 0].numpy())
    assert result.delta == int(delta)


def test_image_attention_ranges_equal_the_gemma3_masks_of_transformers() -> None:
    window, length = 6, 40
    ranges = [ImageRange(0, 0, 0, 4), ImageRange(1, 0, 7, 9), ImageRange(2, 0, 17, 3), ImageRange(3, 0, 38, 2)]
    types = torch.zeros(1, length, dtype=torch.int64)
    for image_range in ranges:
        types[:, image_range.start : image_range.end] = 1
    masks = create_masks_for_vision_model(
        config=Gemma3TextConfig(
            sliding_window=window,
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
            attn_implementation="eager",  # pyright: ignore[reportCallIssue] - a setting of the base class
        ),
        inputs_embeds=torch.zeros(1, length, 8),
        attention_mask=None,
        cache=None,
        position_ids=torch.arange(length)[None],
        block_sequence_ids=get_block_sequence_ids_for_mask(types),
    )
    request = Generate(id=0, prompt=[0] * length, max_tokens=1, sampling=SamplingParams(), image_ranges=ranges)
    ends = PromptImages(request, ImageTraits(whole=True)).attention_ends(0, length)
    assert ends is not None
    keys, queries = np.arange(length), np.arange(length)[:, None]
    before = keys < ends[:, None]
    np.testing.assert_array_equal(before, masks["full_attention"][0, 0].numpy() == 0)
    np.testing.assert_array_equal(before & (keys > queries - window), masks["sliding_attention"][0, 0].numpy() == 0)
