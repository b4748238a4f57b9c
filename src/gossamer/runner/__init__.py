"""The door for people who train from config files: classifiers and detectors, dense or sparse.

    from gossamer.runner import run

    result = run("configs/cls/resnet/res18.yaml", data="tiny")
"""
