"""One model in two places: whether both give its numbers but for rounding, held against noise that is measured, and
where it goes wrong if not.

`sample` keeps requests of a comparison, `noise` runs them in other forms and with moved inputs, `decision` has the
statistics, `judge` the finding, `first_difference` the node. Imported only where such a pair is compared.
"""

from olive_ext.plugins.diagnose.places.judge import Places, judged
from olive_ext.plugins.diagnose.places.sample import Kept, Sample

__all__ = ["Kept", "Places", "Sample", "judged"]
