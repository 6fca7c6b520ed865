"""Log-mel features of chunks of sound, as NeMo's streaming models were trained on and onnxruntime-genai computes them.

Axes: B sounds, N samples of a chunk, F frames, K bins of the spectrum, M mels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from olive_ext.model.files.transducer import TransducerConfig


class LogMel:
    """The features of sounds that are heard side by side, chunk by chunk: half a window of the last chunk is kept, and
    so are the last frames, which the encoder is shown again."""

    def __init__(self, config: TransducerConfig, filters_KM: npt.NDArray[np.float64], batch: int) -> None:
        """`batch` sounds begin in silence."""
        self._config = config
        self._filters_KM = filters_KM
        self._window = np.hanning(config.win_length)
        self._overlap = np.zeros((batch, config.fft_size // 2))
        self._last = np.zeros((batch, 1))
        self._before = np.zeros((batch, config.pre_encode_cache_size, config.num_mels), np.float32)

    def frames(self, samples_BN: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The next chunk's frames behind the last ones before it [B, F, M]."""
        config = self._config
        given = samples_BN.astype(np.float64)
        emphasized = given - config.preemph * np.concatenate([self._last, given[:, :-1]], 1)
        self._last = given[:, -1:]
        offset = (config.fft_size - config.win_length) // 2
        padded = np.pad(np.concatenate([self._overlap, emphasized], 1), ((0, 0), (0, offset)))
        self._overlap = emphasized[:, -(config.fft_size // 2) :]
        windows = np.lib.stride_tricks.sliding_window_view(padded[:, offset:], config.win_length, axis=1)
        spectrum = np.fft.rfft(windows[:, :: config.hop_length] * self._window, config.fft_size)
        power = spectrum.real**2 + spectrum.imag**2
        mel_BFM = np.log(power @ self._filters_KM + config.log_eps).astype(np.float32)
        shown = np.concatenate([self._before, mel_BFM], 1)
        self._before = shown[:, -config.pre_encode_cache_size :]
        return shown
