#!/usr/bin/env bash
# Unpacks packages of Debian 12, and what they need and this machine lacks, into DIR/root. Installs nothing.
#
#   bash .ci/debian.sh DIR SUITE PACKAGE...        SUITE: bookworm or bookworm-backports
set -u

die() { echo "debian.sh: $*" >&2; exit 1; }

[ $# -ge 3 ] || die "usage: bash .ci/debian.sh DIR SUITE PACKAGE..."
[ "$(id -u)" -eq 0 ] || die "must run as root"
release=$(. /etc/os-release 2>/dev/null && echo "${ID-} ${VERSION_ID-}")
[ "$release" = "debian 12" ] || die "needs Debian 12 (bookworm), this is '${release:-unknown}'"
[ "$(dpkg --print-architecture)" = amd64 ] || die "needs amd64, this is $(dpkg --print-architecture)"
dir=$(mkdir -p "$1" && cd "$1" && pwd) || die "cannot write to $1"
[[ $dir != *[[:space:]:]* ]] || die "'$dir' must have neither spaces nor colons"
suite=$2
shift 2

# An apt of its own: other sources and other lists, but the machine's installed packages, so that only what is missing
# is downloaded.
apt=$dir/apt
rm -rf "$apt/archives" "$dir/root"  # of an earlier call
mkdir -p "$apt/lists/partial" "$apt/archives/partial" || die "cannot write to $apt"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
for each in bookworm bookworm-backports; do
  echo "deb [signed-by=$keys] ${DEBIAN_MIRROR:-http://deb.debian.org/debian} $each main"
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
apt-get -q install -y --download-only --reinstall --no-install-recommends -t "$suite" "$@" >> "$log" 2>&1 ||
  die "cannot download $* (no network?), see $log"
for package in "$apt"/archives/*.deb; do
  dpkg-deb --extract "$package" "$dir/root" >> "$log" 2>&1 || die "cannot unpack $package, see $log"
done
