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
[ "$(id -u)" -eq 0 ] || die "must run as root, which making a mount namespace needs"
release=$(. /etc/os-release 2>/dev/null && echo "${ID-} ${VERSION_ID-}")
[ "$release" = "debian 12" ] || die "needs Debian 12 (bookworm), this is '${release:-unknown}'"
[ "$(dpkg --print-architecture)" = amd64 ] || die "needs amd64, this is $(dpkg --print-architecture)"
unshare --mount mount -t tmpfs none /sys/class 2>/dev/null || die "no permission to mount in a namespace of its own (unshare)"
dir=$(mkdir -p "$1" && cd "$1" && pwd) || die "cannot write to $1"
[[ $dir != *[[:space:]:]* ]] || die "'$dir' must have neither spaces nor colons"

# An apt of its own: other sources and other lists, but the machine's installed packages, so that only what is missing
# is downloaded. It never installs.
apt=$dir/apt
rm -rf "$apt/archives" "$dir/root"  # of an earlier call
mkdir -p "$apt/lists/partial" "$apt/archives/partial" || die "cannot write to $apt"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
for suite in bookworm bookworm-backports; do
  echo "deb [signed-by=$keys] ${DEBIAN_MIRROR:-http://deb.debian.org/debian} $suite main"
done > "$apt/sources.list"
cat > "$apt/apt.conf" <<CONF
Dir::Etc::SourceList "$apt/sources.list";
Dir::Etc::SourceParts "-";
Dir::State::Lists "$apt/lists";
Dir::Cache::Archives "$apt/archives";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
APT::Update::Error-Mode "any";
CONF
export APT_CONFIG=$apt/apt.conf
log=$apt/log
apt-get -q update > "$log" 2>&1 || die "cannot read Debian's package lists (no network?), see $log"
apt-get -q install -y --download-only --reinstall --no-install-recommends -t bookworm-backports \
  mesa-vulkan-drivers libvulkan1 >> "$log" 2>&1 || die "cannot download Mesa (no network?), see $log"

root=$dir/root
for package in "$apt"/archives/*.deb; do
  dpkg-deb --extract "$package" "$root" >> "$log" 2>&1 || die "cannot unpack $package, see $log"
done
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
