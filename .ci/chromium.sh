#!/usr/bin/env bash
# Gives a machine a headless Chromium for the tests of the report's page.
#
#   bash .ci/chromium.sh DIR      once; nothing outside DIR is changed; then DIR/chromium is the browser
set -u

die() { echo "chromium.sh: $*" >&2; exit 1; }

[ $# -eq 1 ] || die "usage: bash .ci/chromium.sh DIR"
bash "${0%/*}/debian.sh" "$1" bookworm chromium fonts-dejavu-core || exit 1
dir=$(cd "$1" && pwd)
root=$dir/root
[ -x "$root/usr/lib/chromium/chromium" ] || die "the downloaded Chromium has no program"
cat > "$dir/chromium" <<RUN
#!/usr/bin/env bash
export LD_LIBRARY_PATH=$root/usr/lib/x86_64-linux-gnu:$root/usr/lib/x86_64-linux-gnu/pulseaudio FONTCONFIG_SYSROOT=$root
exec $root/usr/lib/chromium/chromium "\$@"
RUN
chmod +x "$dir/chromium"
echo "$dir/chromium is ready"
