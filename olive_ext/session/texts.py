"""What turns texts into requests to one model, and its answers into texts: tokenizer, stop ids, an encoder-decoder's
source, pictures and sounds. Opens no model."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from olive_ext.media.items import ItemLimit
from olive_ext.media.processor import MediaProcessor
from olive_ext.model import ResolvedModel
from olive_ext.records import Records
from olive_ext.session.encoder_decoder import Encoding, read_encoding
from olive_ext.session.executor import Executor, RecordsElsewhere
from olive_ext.session.generation_bounds import StopIds, read_stop_ids
from olive_ext.session.placeholders import MediaText, read_markers
from olive_ext.session.session import Session
from olive_ext.session.tokenizer import Rows, Tokenizer, load_tokenizer
from olive_ext.session.tokenizer_fit import hold_to_files, refuse_smaller_vocabulary

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Texts:
    """How requests of texts become requests of tokens for one model."""

    model: ResolvedModel
    tokenizer: Tokenizer
    stops: StopIds
    """Tokens that end every generation."""

    encoding: Encoding | None
    """How an encoder-decoder's requests are converted; None for a decoder."""

    @property
    def name(self) -> str:
        """The model as the user named it, for errors."""
        return self.model.settings.model

    def media(self, limit: ItemLimit) -> MediaText | None:
        """How pictures and sounds of at most `limit` tokens are put into prompts; None for a model without them."""
        if self.model.media is None:
            return None
        files = self.model.processor_files
        processor = MediaProcessor(self.model.media, files, self.model.settings.engine.threads)
        return read_markers(processor, files, self.tokenizer, limit)

    def session(
        self,
        executor: Executor,
        media: MediaText | None,
        *,
        records: Records | RecordsElsewhere | None = None,
        beside: Session | None = None,
    ) -> Session:
        """A session whose requests `executor` runs."""
        facts = {"model": self.model.name, "tokenizer": self.tokenizer.where, **self.stops.facts}
        if self.tokenizer.note:
            facts["tokenizer_note"] = self.tokenizer.note
        return Session(
            executor,
            self.tokenizer,
            stop_ids=self.stops.ids,
            facts=facts,
            encoding=self.encoding,
            records=records,
            model=self.model,
            media=media,
            beside=beside,
        )


def read_texts(model: ResolvedModel, tokenizer: Tokenizer | None = None) -> Texts:
    """Tokenizer (or the one that is open already), stop ids and encoding. Raises `ModelError` and `ConfigError` for all
    that opening the model refuses of its tokenizer and of the configurations of a generation."""
    tokenizer = tokenizer or open_tokenizer(model)
    stops = read_stop_ids(model.processor_files, tokenizer.eos_token_id)
    return Texts(model, tokenizer, stops, read_encoding(tokenizer, model, model.source or (None, None)))


def open_tokenizer(model: ResolvedModel) -> Tokenizer:
    """The tokenizer. Raises `ModelError` where it has tokens that the model does not, and where transformers encode
    otherwise than its files say."""
    settings = model.settings
    tokenizer = load_tokenizer(
        model.files.tokenizer,
        add_bos_token=settings.add_bos_token,
        prefix_token_id=settings.prefix_token_id,
        trust_remote_code=settings.trust_remote_code,
    )
    tokenizer.rows = Rows.of(model)
    if model.runtime.runs_graph:
        refuse_smaller_vocabulary(tokenizer, model.spec.vocab_size, str(model.files.decoder))
    tokenizer.note = hold_to_files(tokenizer, settings.add_bos_token)
    if tokenizer.note:
        logger.warning("%s", tokenizer.note)
    return tokenizer
