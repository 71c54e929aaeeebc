#!/bin/sh
# sh scripts/stop.sh [RUN ...]: end this folder's runs, as stop.py describes.
exec "${PYTHON:-python3}" "$(dirname -- "$0")/stop.py" "$@"
