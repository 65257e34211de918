#!/bin/sh
# Installs what the cross builds and QEMU runs need when root on Debian; otherwise says what to install.
set -eu
need=""
command -v qemu-aarch64 >/dev/null 2>&1 || need="$need qemu-user"
command -v aarch64-linux-gnu-g++ >/dev/null 2>&1 || need="$need gcc-aarch64-linux-gnu g++-aarch64-linux-gnu"
command -v g++ >/dev/null 2>&1 || need="$need g++"
command -v cmake >/dev/null 2>&1 || need="$need cmake"
python3 -c 'import ensurepip' >/dev/null 2>&1 || need="$need python3-venv"
[ -z "$need" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  apt-get update -qq
  # shellcheck disable=SC2086
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $need >/dev/null
else
  echo "missing system packages: install$need (Debian: apt-get install$need)" >&2
  exit 5
fi
