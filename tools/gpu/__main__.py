"""`PYTHONPATH=. python -m tools.gpu`: see report.py."""

from tools.gpu.report import main

if __name__ == "__main__":
    main()
