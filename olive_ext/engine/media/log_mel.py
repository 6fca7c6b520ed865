"""Log-mel features of chunks of sound, as NeMo's streaming models were trained on and onnxruntime-genai computes them.

Axes: B sounds, N samples of a chunk, F frames, K bins of the spectrum, M mels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from olive_ext.model.files.transducer import TransducerConfig

_LINEAR, _KNEE = 200 / 3, 1000.0
"""Slaney's scale: hertz of a mel below the knee, and the knee in hertz."""

_STEP = np.log(6.4) / 27


def mel_filters(num_mels: int, fft_size: int, rate: int) -> npt.NDArray[np.float64]:
    """Triangles [M, K] of Slaney's scale, each of area one in hertz, from 0 to half the rate."""
    knee = _KNEE / _LINEAR
    top = knee + np.log(rate / 2 / _KNEE) / _STEP if rate / 2 >= _KNEE else rate / 2 / _LINEAR
    mels = np.linspace(0, top, num_mels + 2)
    edges = np.where(mels < knee, mels * _LINEAR, _KNEE * np.exp((mels - knee) * _STEP))
    bins_K = np.arange(fft_size // 2 + 1) * rate / fft_size
    widths = np.diff(edges)[:, None]
    rising = (bins_K - edges[:-2, None]) / widths[:-1]
    falling = (edges[2:, None] - bins_K) / widths[1:]
    heights = 2 / (edges[2:] - edges[:-2])
    return np.asarray(np.maximum(0, np.minimum(rising, falling)) * heights[:, None])


class LogMel:
    """The features of sounds that are heard side by side, chunk by chunk: half a window of the last chunk is kept, and
    so are the last frames, which the encoder is shown again."""

    def __init__(self, config: TransducerConfig, batch: int) -> None:
        """`batch` sounds begin in silence."""
        self._config = config
        self._filters = mel_filters(config.num_mels, config.fft_size, config.sample_rate)
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
        mel_BFM = np.log(power @ self._filters.T + config.log_eps).astype(np.float32)
        shown = np.concatenate([self._before, mel_BFM], 1)
        self._before = shown[:, -config.pre_encode_cache_size :]
        return shown
