#!/usr/bin/env bash
# Installs the image's system packages and creates its user and folders. Runs as root in Ubuntu or Debian.
set -euo pipefail

packages=(
  ca-certificates
  python3-venv
  # Triton and torch.compile build code at run time, against Python's headers
  g++
  python3-dev
  # NCCL loads them at run time, for InfiniBand
  ibverbs-providers
  libibverbs1
  librdmacm1
)
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes --no-install-recommends "${packages[@]}"
rm -rf /var/lib/apt/lists/*

# Ubuntu's image has a user with this id, which is the one that most bind mounts belong to.
if existing=$(getent passwd 1000); then
  userdel --remove "${existing%%:*}"
fi
useradd --create-home --uid 1000 megatron

# Recipes write below the working folder: runs go to a volume, data of the quick start stays there.
install --directory --owner=megatron /runs /huggingface /opt/megatron-rl
ln --symbolic --force --no-dereference /runs /opt/megatron-rl/runs
