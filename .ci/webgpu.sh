#!/usr/bin/env bash
# Gives a machine without a GPU a Vulkan device, so that the tests of the WebGPU provider can run on it.
#
#   bash .ci/webgpu.sh DIR        once; nothing outside DIR is changed
#   DIR/run COMMAND...            as often as wanted; exits with the command's status
#
# The device is Mesa's lavapipe. Debian 12's own Mesa is too old for the provider, so it comes from backports.
set -u

die() { echo "webgpu.sh: $*" >&2; exit 1; }

[ $# -eq 1 ] || die "usage: bash .ci/webgpu.sh DIR"
unshare --mount mount -t tmpfs none /sys/class 2>/dev/null || die "no permission to mount in a namespace of its own (unshare)"
bash "${0%/*}/debian.sh" "$1" bookworm-backports mesa-vulkan-drivers libvulkan1 || exit 1
dir=$(cd "$1" && pwd)
root=$dir/root
libraries=$root/usr/lib/x86_64-linux-gnu
driver=$root/usr/share/vulkan/icd.d/lvp_icd.json
[ -f "$driver" ] || driver=${driver%.json}.x86_64.json
[ -f "$driver" ] || die "the downloaded Mesa has no lavapipe"

# ONNX Runtime takes its list of GPUs from /sys/class/drm: show it one card, to the command and its children only.
cat > "$dir/run" <<RUN
#!/usr/bin/env bash
export LD_LIBRARY_PATH=$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH} VK_DRIVER_FILES=$driver
exec unshare --mount bash -c '
  card=/sys/class/drm/card0/device
  mount -t tmpfs none /sys/class && mkdir -p \$card || exit 125
  echo 0x1af4 > \$card/vendor; echo 0x0000 > \$card/device; echo 0x030000 > \$card/class
  exec "\$@"' run "\$@"
RUN
chmod +x "$dir/run"
echo "$dir/run is ready"
