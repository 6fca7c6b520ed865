"""Jobs on other machines: a recipe becomes a folder that Azure ML's command line submits.

Nothing here submits, needs an account or imports Azure's packages. Knows recipes as `check` reads them; knows no Olive
and no model.
"""

from olive_ext.registry import Command, Plugin

plugin = Plugin(
    commands={
        "job": Command(
            "Write the folder of a job for a recipe: job.yml, code, environment, README. Never submits it.",
            "olive_ext.plugins.jobs.azureml:job_command",
            (
                (
                    "kind",
                    "azureml",
                    "Where the job is to run: azureml (a command job of Azure ML, for `az ml job create`).",
                    {"choices": ("azureml",)},
                ),
                ("recipe", "RECIPE", "The recipe, .json or .yaml.", {}),
                (
                    "--compute",
                    "NAME",
                    "Compute cluster, or another target that Azure ML knows by this name.",
                    {"required": True},
                ),
                ("--output", "DIR", "A folder that is new or empty.", {"required": True}),
            ),
        )
    }
)
