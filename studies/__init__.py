"""The studies, one command each: a folder with `experiment.toml`, `README.md`, `findings.py`.

`spec` reads the steps, `running` does them by the public commands, `outcome` reads what they left,
the folder's `findings` makes tables, figures and verdicts of it, `page` writes them down.
Nothing here imports torch.
"""
