"""What the routes work with, put together once the model is loaded. Found at `app.state.services`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

from runner.messages import ModelInfo
from server.answer_memory import AnswerMemory
from server.background_tasks import BackgroundTasks
from server.batch import Engine
from server.chat_template import ChatTemplate
from server.embedding_markers import EmbeddingMarkers
from server.embeddings import Rows
from server.errors import ModelNotFound, Unavailable, bounded
from server.grammars import Grammars
from server.image_template import ImageTemplate, processor_template
from server.pooling import Dimensions, Pooling, load_pooling
from server.reasoning.styles import ReasoningStyle, load_reasoning_style
from server.responses.store import ResponseStore
from server.sampling import GenerationDefaults
from server.soft_prompts import SoftPromptError, SoftPrompts
from server.stored_embeddings import StoredEmbeddings
from server.tokenizer import Tokenizer
from server.tools.styles import ToolStyle, load_tool_style
from server.vision import Vision


@dataclass(frozen=True, slots=True)
class Services:
    engine: Engine
    model: ModelInfo
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    defaults: GenerationDefaults
    grammars: Grammars
    responses: ResponseStore
    served_model_names: tuple[str, ...]
    """At least one; the first is what answers say when the request named none."""
    tool_style: ToolStyle | None = None
    """How the model writes tool calls; None: it does not, or nobody knows."""
    reasoning_style: ReasoningStyle | None = None
    """None: the model does not reason, or its reasoning is content."""
    soft_prompts: SoftPrompts = field(default_factory=SoftPrompts)
    enable_prompt_embeds: bool = True
    honour_priority: bool = False
    strict_params: bool = False
    """Whether parameters that nobody knows are refused."""
    trust_request_template: bool = False
    """Whether a request may bring its own chat template."""
    default_pooling: Pooling = "mean"
    """Of /v1/embeddings."""
    dimensions: Dimensions = field(default_factory=Dimensions)
    """To which lengths embeddings may be cut."""
    answer_memory: AnswerMemory = field(default_factory=AnswerMemory)
    vision: Vision | None = None
    """None: the model takes no images."""
    image_template: ImageTemplate | None = None
    """Set if `vision` is."""
    max_json_bytes: int = 16 << 20
    """Of a request's JSON, without long embeddings and images."""
    background: BackgroundTasks = field(default_factory=BackgroundTasks)
    """Responses in the background."""
    stored: StoredEmbeddings | None = None
    """Prompt embeddings that clients have stored; None: this server stores none."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970: when the model became available."""

    @classmethod
    def load(
        cls,
        engine: Engine,
        model: ModelInfo,
        responses: ResponseStore,
        *,
        served_model_names: Sequence[str],
        chat_template: str | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        generation_config: str = "auto",
        soft_prompts: Sequence[tuple[str, str]] = (),
        enable_prompt_embeds: bool = True,
        honour_priority: bool = False,
        strict_params: bool = False,
        trust_request_template: bool = False,
        max_json_bytes: int = 16 << 20,
        stored: StoredEmbeddings | None = None,
        trust_remote_code: bool = False,
        pooling: str = "auto",
        on_compiled: Callable[[float], None] = lambda seconds: None,
        allowed_media_domains: Sequence[str] = (),
    ) -> Services:
        """Takes seconds (it imports transformers): call it in a thread. `chat_template`: a file, or a template.
        `on_compiled`: see `Grammars`. `soft_prompts`: names and paths.

        Raises ValueError, whose message is for the operator, when the model's folder or an argument is of no use
        (SoftPromptError for a soft prompt).
        """
        folder = Path(model.path)
        tokenizer = Tokenizer.load(folder, trust_remote_code=trust_remote_code)
        vision = None
        if model.vision is not None:
            vision = Vision.load(folder, model.vision, tokenizer, allowed_media_domains)
            if tokenizer.transformers.chat_template is None:
                tokenizer.transformers.chat_template = processor_template(folder)
        template = ChatTemplate.load(tokenizer, chat_template)
        return cls(
            engine=engine,
            model=model,
            tokenizer=tokenizer,
            chat_template=template,
            defaults=GenerationDefaults.load(
                folder, generation_config, vocab_size=model.vocab_size, tokenizer_eos=tokenizer.eos_token_id
            ),
            grammars=Grammars(tokenizer, model.vocab_size, on_compiled),
            responses=responses,
            served_model_names=tuple(served_model_names),
            tool_style=load_tool_style(tool_call_parser, template.all_text),
            reasoning_style=load_reasoning_style(reasoning_parser, template.all_text),
            soft_prompts=_load_soft_prompts(soft_prompts, model, served_model_names),
            enable_prompt_embeds=enable_prompt_embeds,
            honour_priority=honour_priority,
            strict_params=strict_params,
            trust_request_template=trust_request_template,
            max_json_bytes=max_json_bytes,
            stored=stored,
            default_pooling=load_pooling(folder, pooling),
            dimensions=Dimensions.load(folder),
            vision=vision,
            image_template=None if vision is None else ImageTemplate(template, vision),
        )

    def markers(self) -> EmbeddingMarkers:
        """For the embeddings and images of one conversation."""
        sees = self.vision is not None and self.image_template is not None and self.image_template.knows_images
        marker = self.vision.marker if self.vision is not None and sees else ""
        return EmbeddingMarkers(take_embeddings=self.enable_prompt_embeds, image_marker=marker)

    @property
    def system_fingerprint(self) -> str:
        """Changes with what could change an answer to the same request and seed."""
        parts: tuple[object, ...] = (
            self.served_model_names[0],
            self.model.model_type,
            self.model.dtype,
            self.model.max_model_len,
        )
        if self.soft_prompts.rows:
            parts += (self.soft_prompts.digest,)
        return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:10]

    def model_name(self, asked: str | None) -> str:
        """The name for an answer. Raises ModelNotFound for a model that is not served."""
        if asked is None:
            return self.served_model_names[0]
        if asked not in self.served_model_names and self.soft_rows(asked) is None:
            raise ModelNotFound(f"The model `{bounded(asked, 100)}` does not exist.")
        return asked

    def soft_rows(self, asked: str | None) -> Rows | None:
        """The rows before every prompt, where `asked` is `base:NAME` with a soft prompt's name."""
        if asked is None or asked in self.served_model_names:
            return None
        base, _, name = asked.rpartition(":")
        return self.soft_prompts.rows.get(name) if base in self.served_model_names else None


def _load_soft_prompts(
    given: Sequence[tuple[str, str]], model: ModelInfo, served_model_names: Sequence[str]
) -> SoftPrompts:
    for name, _ in given:
        if taken := {f"{base}:{name}" for base in served_model_names} & set(served_model_names):
            raise SoftPromptError(f"soft prompt {name}: {taken.pop()} is a name of the model itself")
    return SoftPrompts.load(given, model)


def services_of(request: Request) -> Services:
    """Raises Unavailable while the model is loading."""
    services: Services | None = getattr(request.app.state, "services", None)
    if services is None:
        raise Unavailable("The model is still loading.")
    return services
