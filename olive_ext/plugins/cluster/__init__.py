"""Workers on a Ray cluster, or several on this machine (`workers`)."""

from olive_ext.registry import Plugin

plugin = Plugin(hooks={"workers": "olive_ext.plugins.cluster.ray_worker:ray_workers"})
