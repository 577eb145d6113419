"""`python -m arcface_keras`."""

import sys

from arcface_keras.cli import main

sys.exit(main())
