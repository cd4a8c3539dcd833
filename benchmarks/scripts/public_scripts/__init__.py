"""What do Mezzo's commands do with public training scripts, each at a fixed commit and unedited?

    python -m benchmarks public_scripts CLONES                     all of them: eight trainings or more for each script
    python -m benchmarks public_scripts CLONES --only 'mnist|gan'  those whose repository, file or arguments match
    python -m benchmarks public_scripts CLONES --list              the command lines, without running anything

``CLONES`` is a folder with a clone of each repository, named ``owner+name``; a commit that is missing is fetched from GitHub, without its
history. No script is copied into this project: it runs in a new folder that git checks out from the commit. Data that a script
would download are replaced by small generated files (``data.py``) or generated images (``standins``); its code is never changed.
torchvision, matplotlib, gymnasium, lightning, accelerate and all other packages that a script imports must be installed with Mezzo.
"""
