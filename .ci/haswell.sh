#!/usr/bin/env bash
# Gives a machine a processor without AVX-512, so that the tests of rounded kernels run on one.
#
#   bash .ci/haswell.sh DIR       once; nothing outside DIR is changed
#   DIR/run PYTHON ARGUMENT...    as often as wanted; exits with the command's status
#
# The processor is qemu's Haswell, which has AVX2. Processes that the command starts run on the machine's own.
set -u

die() { echo "haswell.sh: $*" >&2; exit 1; }

[ $# -eq 1 ] || die "usage: bash .ci/haswell.sh DIR"
bash "${0%/*}/debian.sh" "$1" bookworm qemu-user-static || exit 1
dir=$(cd "$1" && pwd)
qemu=$dir/root/usr/bin/qemu-x86_64-static
[ -x "$qemu" ] || die "the downloaded package has no qemu-x86_64-static"

# What Haswell has and this qemu lacks is named, or each process begins with a warning for it.
cat > "$dir/run" <<RUN
#!/usr/bin/env bash
export OLIVE_EXT_EMULATED=1
exec $qemu -cpu Haswell-noTSX,-pcid,-x2apic,-tsc-deadline,-invpcid "\$@"
RUN
chmod +x "$dir/run"
"$dir/run" /bin/true || die "qemu does not run here"
echo "$dir/run is ready"
