//! Linux's own tests of what maps, in a kernel with its own tables and in the same with ours: KUnit's of generic_pt,
//! the selftests of iommufd and VFIO, and its drivers of a disk and of a network device, which move data for a minute.
//!
//! On Arm and RISC-V there are KUnit's tests and the drivers. Linux 7.2 has no DMA API and no VFIO behind RISC-V's IOMMU:
//! `linux/patches/riscv.c` is what both kernels have there, and Linux lacks.
//!
//! Both kernels run side by side, and each test has to end in the same way in both. So has what a kernel says about itself
//! where it looks for mistakes: nothing that begins with `BUG` or `WARNING` may be said with our tables alone.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, ensure};
use conformance::{
    apt::{self, Apt},
    initramfs::Initramfs,
    kernel::{Arch, Kernel, Tables},
    newer_qemu::{MACHINE, NewerQemu},
    patch::Patch,
};

use crate::{
    machines::{NVME, Unit},
    qemu::{arch, remove, slot},
};

/// How long all tests of a kernel may take: a safety net.
const LIMIT: Duration = Duration::from_secs(3 * 3600);

/// Directory of the tests, below a kernel's tree.
const SELFTESTS: &str = "tools/testing/selftests";

/// The selftests' programs, by source; those of VFIO take the device's address, and all of [`LIBRARY`].
const IOMMUFD: [&str; 2] = ["iommu/iommufd", "iommu/iommufd_fail_nth"];
const VFIO: [&str; 4] = [
    "vfio/vfio_dma_mapping_test",
    "vfio/vfio_dma_mapping_mmio_test",
    "vfio/vfio_iommufd_setup_test",
    "vfio/vfio_pci_device_test",
];
const LIBRARY: &str = "vfio/lib";
const LIBRARY_SOURCES: [&str; 8] = [
    "drivers/dsa/dsa.c",
    "drivers/ioat/ioat.c",
    "iommu.c",
    "iova_allocator.c",
    "libvfio.c",
    "sysfs.c",
    "vfio_pci_device.c",
    "vfio_pci_driver.c",
];

/// First process of the guest: busybox's shell.
const BUSYBOX: &str = "/bin/busybox";
/// The suite whose are those of other architectures.
const SUITE: &str = "trixie";

/// Marks before a program's lines and behind them.
const BEGINS: &str = "=== begins ";
const ENDS: &str = "=== ends";
const MAPPED: &str = "=== maps ";

/// Bytes of the disk, and two network devices on one wire.
const DISK: u64 = 64 << 20;
const NETWORK: [&str; 8] = [
    "-netdev",
    "hubport,id=one,hubid=0",
    "-netdev",
    "hubport,id=other,hubid=0",
    "-device",
    "e1000e,netdev=one",
    "-device",
    "e1000e,netdev=other",
];

/// A run of a kernel.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// KUnit's suites, as the kernel boots.
    Kunit,
    /// The programs.
    Selftests,
    /// Data to a disk and back, and over a wire from one network device to another, behind this unit; unmaps are flushed
    /// at once, or later.
    Drivers(Unit, Flush),
}

#[derive(Clone, Copy, Debug)]
enum Flush {
    Strict,
    Lazy,
}

impl Part {
    fn name(self) -> String {
        match self {
            Self::Kunit => "kunit".into(),
            Self::Selftests => "selftests".into(),
            Self::Drivers(unit, flush) => format!("drivers-{unit:?}-{flush:?}").to_lowercase(),
        }
    }
}

/// All of them, by architecture.
const PARTS: [Part; 6] = [
    Part::Kunit,
    Part::Selftests,
    Part::Drivers(Unit::Intel, Flush::Strict),
    Part::Drivers(Unit::IntelSecond, Flush::Lazy),
    Part::Drivers(Unit::IntelFirst, Flush::Strict),
    Part::Drivers(Unit::Amd, Flush::Lazy),
];
const ARM_PARTS: [Part; 3] = [
    Part::Kunit,
    Part::Drivers(Unit::Smmu1, Flush::Strict),
    Part::Drivers(Unit::Smmu2, Flush::Lazy),
];
const RISCV_PARTS: [Part; 2] = [Part::Kunit, Part::Drivers(Unit::RiscV, Flush::Strict)];

/// Seconds for which data is moved.
const SECONDS: u32 = 60;

/// Count of the maps that were ours, in a kernel with our tables.
const MAPS: &str = "/sys/module/dmaspace_tables/parameters/maps";

/// Report of KCSAN, with the functions that race. By its strictest rules Linux has many of its own, others in each
/// run; so it counts where a function is ours, in C or Rust.
const RACE: &str = "BUG: KCSAN: ";
const OURS: [&str; 2] = ["dmaspace_", "_ZN"];

/// Outcome of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Passed,
    Failed,
    Skipped,
}

/// Results of a run.
#[derive(Debug, Default)]
struct Said {
    tests: BTreeMap<String, End>,
    /// Complaints of the kernel.
    complaints: BTreeSet<String>,
    /// How much the drivers have moved.
    moved: Option<String>,
    /// Maps of our tables, as the kernel has counted them.
    maps: Option<u64>,
    /// Programs that did not end as they should, and what ended a run before its end.
    broken: Vec<String>,
}

/// Runs the tests in `kernel`, patched or not: all of them, or the parts whose names contain `only`; of KUnit's suites those
/// that the pattern `suites` names. With `planted` faults our tables are others than the sources say.
///
/// # Errors
///
/// When there is no kernel of today's sources, a program cannot be built, a guest does not come to its end, or a test ends in
/// another way with our tables.
pub fn run(
    (kernel, patches, planted): (Kernel, &[Patch], bool),
    work: &Path,
    (only, suites): (Option<&str>, &str),
) -> anyhow::Result<()> {
    let stock = kernel.linked(Tables::Stock, patches, work)?;
    let ours = match planted {
        false => kernel.linked(Tables::Iopt, patches, work)?,
        true => kernel.image_with(Tables::Iopt, work),
    };
    let wanted = |part: &Part| {
        only.is_none_or(|only| only.split(',').any(|only| part.name().contains(only)))
    };
    let parts: &[Part] = match kernel.arch {
        Arch::Arm => &ARM_PARTS,
        Arch::RiscV => &RISCV_PARTS,
        Arch::X86 | Arch::Um => &PARTS,
    };
    let parts: Vec<Part> = parts.iter().copied().filter(wanted).collect();
    ensure!(!parts.is_empty(), "no part has this name");
    let directory = crate::qemu::directory(work);
    fs::create_dir_all(&directory)?;
    let initramfs = directory.join(format!("{}.initramfs", kernel.name));
    fs::write(&initramfs, programs(kernel, patches, work)?)?;
    // Once, and not by both.
    NewerQemu::fetch(kernel.arch, work)?;
    let all = |image: &Path, tables| -> anyhow::Result<Vec<(Said, u64)>> {
        let runs = parts.iter().map(|part| {
            let start = Instant::now();
            let said = once((kernel, image), work, &initramfs, (*part, tables), suites)?;
            Ok((said, start.elapsed().as_secs()))
        });
        runs.collect()
    };
    let (stock, ours) = thread::scope(|scope| {
        let stock = scope.spawn(|| all(&stock, Tables::Stock));
        let ours = all(&ours, Tables::Iopt);
        (stock.join(), ours)
    });
    let stock = stock.map_err(|_| anyhow!("a thread panicked"))??;
    let mut wrong = 0;
    for (part, (stock, ours)) in parts.iter().zip(stock.iter().zip(&ours?)) {
        println!("{} {}", kernel.name, part.name());
        wrong += compare(stock, ours);
    }
    ensure!(
        wrong == 0,
        "{wrong} differences between Linux's tables and ours"
    );
    Ok(())
}

/// Prints what there is, and returns how many things are wrong with ours.
fn compare((stock, stock_took): &(Said, u64), (ours, ours_took): &(Said, u64)) -> usize {
    for (whose, said, took) in [
        ("Linux's tables", stock, stock_took),
        ("ours", ours, ours_took),
    ] {
        let count = |end| said.tests.values().filter(|found| **found == end).count();
        println!(
            "  {whose}, {took} s: {} passed, {} failed, {} skipped; {} complaints of the kernel{}",
            count(End::Passed),
            count(End::Failed),
            count(End::Skipped),
            said.complaints.len(),
            said.maps
                .map_or(String::new(), |maps| format!("; {maps} maps")),
        );
        if let Some(moved) = &said.moved {
            println!("    {moved}");
        }
        for complaint in &said.complaints {
            println!("    {complaint}");
        }
        for broken in &said.broken {
            println!("    {broken}");
        }
    }
    let names: BTreeSet<&String> = stock.tests.keys().chain(ours.tests.keys()).collect();
    let mut wrong = ours.broken.len() + usize::from(ours.tests.is_empty());
    for name in names {
        let (linux, our) = (stock.tests.get(name), ours.tests.get(name));
        // Ours can do more, where a patch has an operation that Linux's tables do not have.
        if linux != our && (linux, our) != (Some(&End::Skipped), Some(&End::Passed)) {
            wrong += 1;
            println!("  DIFFERENT {name}: {linux:?}, ours {our:?}");
        }
    }
    wrong + ours.complaints.difference(&stock.complaints).count()
}

/// Boots the kernel once, and reads what it has said.
fn once(
    (kernel, image): (Kernel, &Path),
    work: &Path,
    initramfs: &Path,
    (part, tables): (Part, Tables),
    suites: &str,
) -> anyhow::Result<Said> {
    let directory = crate::qemu::directory(work);
    let name = format!("{}.{}.{tables:?}", kernel.name, part.name()).to_lowercase();
    let log = directory.join(format!("{name}.log"));
    remove(&log)?;
    let (kunit, script) = match part {
        Part::Kunit => {
            let suites = format!("kunit.enable=1 kunit.autorun=1 kunit.filter_glob={suites}");
            (suites, "nothing")
        }
        Part::Selftests => ("kunit.enable=0".into(), "selftests"),
        Part::Drivers(_, flush) => {
            let strict = u8::from(matches!(flush, Flush::Strict));
            (format!("kunit.enable=0 iommu.strict={strict}"), "drivers")
        }
    };
    let unit = match (part, kernel.arch) {
        (Part::Drivers(unit, _), _) => unit,
        (_, Arch::Arm) => Unit::Smmu1,
        (_, Arch::RiscV) => Unit::RiscV,
        (_, Arch::X86 | Arch::Um) => Unit::Intel,
    };
    let (_, console) = arch(unit);
    let disk = directory.join(format!("{name}.disk"));
    fs::File::create(&disk)?.set_len(DISK)?;
    let mut command = NewerQemu::fetch(kernel.arch, work)?.command();
    command
        .args(MACHINE)
        .args(unit.qemu())
        .args(["-cpu", "max", "-m", "2G"])
        .args(NETWORK)
        .arg("-drive")
        .arg(format!(
            "if=none,id=disk,format=raw,file={}",
            disk.display()
        ))
        .arg("-device")
        .arg(format!("nvme,drive=disk,serial=1,addr={}", slot(NVME)))
        .arg("-serial")
        .arg(format!("file:{}", log.display()))
        .arg("-kernel")
        .arg(image)
        .arg("-initrd")
        .arg(initramfs)
        .arg("-append")
        .arg(format!(
            "{console} panic=-1 hugepages=64 {} {kunit} run={script}",
            unit.kernel()
        ))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut qemu = command.spawn().context("QEMU cannot be started")?;
    let ended = wait(&mut qemu)?;
    let _ = qemu.kill();
    let _ = qemu.wait();
    let text = fs::read(&log).with_context(|| log.display().to_string())?;
    fs::remove_file(&disk)?;
    let mut said = Said::read(&String::from_utf8_lossy(&text));
    if tables == Tables::Iopt && said.maps.is_none_or(|maps| maps == 0) {
        said.broken.push("our tables mapped nothing".into());
    }
    if !ended.is_some_and(|status| status.success()) {
        said.broken
            .push(format!("QEMU: {ended:?}; see {}", log.display()));
    }
    Ok(said)
}

/// How it has ended by itself, if it has.
fn wait(qemu: &mut Child) -> anyhow::Result<Option<ExitStatus>> {
    let start = Instant::now();
    while start.elapsed() < LIMIT {
        if let Some(status) = qemu.try_wait()? {
            return Ok(Some(status));
        }
        thread::sleep(Duration::from_millis(200));
    }
    Ok(None)
}

impl Said {
    /// From a console: the Test Anything Protocol, as KUnit and the programs write it, between what the kernel says.
    fn read(text: &str) -> Self {
        let mut said = Self::default();
        // The suites that are under way, by how far their lines are indented; the programs are none of them.
        let mut suites: Vec<(usize, String)> = Vec::new();
        let mut program = None;
        let mut whole = false;
        for line in text.lines() {
            let line = line.trim_end_matches('\r');
            if ["BUG: ", "WARNING: ", "Kernel panic", "Oops"]
                .iter()
                .any(|word| line.contains(word))
                && (!line.contains(RACE) || OURS.iter().any(|name| line.contains(name)))
            {
                said.complaints.insert(without_numbers(line));
            }
            if let Some(maps) = line.strip_prefix(MAPPED) {
                said.maps = maps.parse().ok();
            }
            if let Some(name) = line.strip_prefix(BEGINS) {
                program = Some(name.to_owned());
            } else if let Some(status) = line.strip_prefix(ENDS) {
                whole |= status == " all";
                if let Some(name) = program
                    .take()
                    .filter(|_| !matches!(status.trim(), "0" | "1" | "4"))
                {
                    said.broken.push(format!("{name} ended with {status}"));
                }
            }
            let indent = line.len() - line.trim_start().len();
            let line = line.trim_start();
            if line.starts_with("# ") && line.contains("over the wire") {
                said.moved = Some(line.to_owned());
            }
            if let Some(name) = line.strip_prefix("# Subtest: ") {
                suites.retain(|(outer, _)| *outer < indent);
                suites.push((indent, name.to_owned()));
                continue;
            }
            let (failed, rest) = match (line.strip_prefix("ok "), line.strip_prefix("not ok ")) {
                (Some(rest), _) => (false, rest),
                (_, Some(rest)) => (true, rest),
                _ => continue,
            };
            let Some((_, name)) = rest.split_once(' ') else {
                continue;
            };
            let (name, skipped) = match name.split_once(" # SKIP") {
                Some((name, _)) => (name, true),
                None => (name, false),
            };
            // A suite's own line says what those of its tests have said.
            let of_suite = suites
                .iter()
                .any(|(inner, suite)| *inner > indent && suite == name);
            suites.retain(|(inner, _)| *inner <= indent);
            if of_suite {
                continue;
            }
            let end = match (skipped, failed) {
                (true, _) => End::Skipped,
                (false, true) => End::Failed,
                (false, false) => End::Passed,
            };
            let suites = suites.iter().map(|(_, suite)| suite.as_str());
            let path: Vec<&str> = program.as_deref().into_iter().chain(suites).collect();
            said.tests
                .insert(format!("{}: {name}", path.join("/")), end);
        }
        if !whole {
            said.broken.push("the guest did not come to its end".into());
        }
        said
    }
}

/// Replaces numbers, which differ from run to run.
fn without_numbers(line: &str) -> String {
    let mut words = Vec::new();
    for word in line.split_whitespace() {
        let number = word.chars().any(|c| c.is_ascii_digit());
        words.push(if number { "#" } else { word });
    }
    words.join(" ")
}

/// The initramfs: the programs, built from the kernel's tree, and what runs them.
fn programs(kernel: Kernel, patches: &[Patch], work: &Path) -> anyhow::Result<Vec<u8>> {
    let mut archive = Initramfs::new()?;
    archive.program("init", script().as_bytes())?;
    let foreign = match kernel.arch {
        Arch::Arm => Some("arm64"),
        Arch::RiscV => Some("riscv64"),
        Arch::X86 | Arch::Um => None,
    };
    if let Some(architecture) = foreign {
        archive.program("bin/busybox", &fs::read(busybox(architecture, work)?)?)?;
        return Ok(archive.finish()?);
    }
    archive.program("bin/busybox", &fs::read(BUSYBOX).context(BUSYBOX)?)?;
    kernel.with_patches(patches, work, |tree| {
        selftests(&tree.canonicalize()?, &mut archive)
    })?;
    Ok(archive.finish()?)
}

/// The selftests' programs, built from a kernel's tree.
fn selftests(tree: &Path, archive: &mut Initramfs) -> anyhow::Result<()> {
    let mut headers = Command::new("make");
    headers.args(["--silent", "ARCH=x86", "headers"]);
    call(headers.current_dir(tree).env_remove("MAKEFLAGS"))?;
    let selftests = tree.join(SELFTESTS);
    let library = selftests.join(LIBRARY);
    for source in IOMMUFD.into_iter().chain(VFIO) {
        let built = tree.join(name(source));
        let of_vfio = VFIO.contains(&source);
        let others: &[&str] = if of_vfio { &LIBRARY_SOURCES } else { &[] };
        let mut gcc = Command::new("gcc");
        // Macro that the library calls and 7.2 does not define.
        gcc.arg("-Dcalloc_assert(count,size)=calloc(count,size)");
        gcc.args(["-O2", "-static", "-pthread", "-D_GNU_SOURCE=", "-o"])
            .arg(&built)
            .arg("-isystem")
            .arg(tree.join("usr/include"))
            .arg("-I")
            .arg(&selftests)
            .arg("-I")
            .arg(library.join("include"))
            .arg("-I")
            .arg(tree.join("tools/include"))
            .arg(selftests.join(source).with_extension("c"))
            .args(others.iter().map(|source| library.join(source)))
            .arg(if of_vfio { "-luuid" } else { "-lcap" });
        call(&mut gcc)?;
        archive.program(&format!("bin/{}", name(source)), &fs::read(built)?)?;
    }
    Ok(())
}

/// That of another architecture, from Debian's package, below `work`.
fn busybox(architecture: &'static str, work: &Path) -> anyhow::Result<PathBuf> {
    let directory = work.join(format!("busybox-{architecture}"));
    let busybox = directory.join("usr/bin/busybox");
    if !busybox.exists() {
        let apt = directory.join("apt");
        let package = Apt::with(&apt, &[SUITE], Some(architecture), |apt| {
            apt.download("busybox-static")
        })?;
        apt::unpack(&[package], &directory)?;
    }
    Ok(busybox)
}

fn call(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().display().to_string();
    let output = command.output().with_context(|| name.clone())?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name}: {}\n{said}", output.status);
    Ok(())
}

fn name(source: &str) -> &str {
    source.rsplit('/').next().unwrap_or(source)
}

/// The guest's first process.
fn script() -> String {
    let mut selftests = String::new();
    for source in IOMMUFD {
        let name = name(source);
        selftests += &format!("echo '{BEGINS}{name}'; {name}; echo {ENDS} $?\n");
    }
    for source in VFIO {
        let name = name(source);
        selftests += &format!("echo '{BEGINS}{name}'; {name} {NVME}; echo {ENDS} $?\n");
    }
    format!(
        "#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t debugfs debug /sys/kernel/debug
exec > /dev/console 2>&1
if grep -q run=selftests /proc/cmdline; then
ulimit -l unlimited
echo {NVME} > /sys/bus/pci/devices/{NVME}/driver/unbind
echo vfio-pci > /sys/bus/pci/devices/{NVME}/driver_override
echo {NVME} > /sys/bus/pci/drivers/vfio-pci/bind
{selftests}fi
if grep -q run=drivers /proc/cmdline; then
unshare -n sleep 100000 & there=$!
sleep 1
ip link set eth1 netns $there
ip addr add 10.0.0.1/24 dev eth0; ip link set eth0 up
nsenter -t $there -n ip addr add 10.0.0.2/24 dev eth1; nsenter -t $there -n ip link set eth1 up
nsenter -t $there -n httpd -p 80 -h /tmp
sleep 3
end=$(($(date +%s) + {SECONDS})); disk=0; wire=0; wrong=0
while [ $(date +%s) -lt $end ]; do
for size in 4 64 1024; do
head -c 4194304 /dev/urandom > /tmp/sent
dd if=/tmp/sent of=/dev/nvme0n1 bs=${{size}}k oflag=direct 2> /dev/null
dd if=/dev/nvme0n1 of=/tmp/read bs=${{size}}k count=$((4096 / size)) iflag=direct 2> /dev/null
cmp /tmp/sent /tmp/read && disk=$((disk + 1)) || wrong=1
wget -q -O /tmp/received http://10.0.0.2/sent
cmp /tmp/sent /tmp/received && wire=$((wire + 1)) || wrong=1
done
done
echo \"# $((disk * 4)) MiB to the disk and back, $((wire * 4)) MiB over the wire\"
[ $wrong -eq 0 -a $disk -gt 0 ] && echo ok 1 disk || echo not ok 1 disk
[ $wrong -eq 0 -a $wire -gt 0 ] && echo ok 2 wire || echo not ok 2 wire
fi
echo \"{MAPPED}$(cat {MAPS})\"
echo {ENDS} all
sync
poweroff -f
"
    )
}

#[cfg(test)]
mod tests {
    use conformance::kernel::TESTS;

    use super::*;

    #[test]
    fn a_kernel_that_is_not_there_runs_no_tests() {
        for planted in [false, true] {
            let built = (TESTS, &[][..], planted);
            let refused = run(built, Path::new("/nowhere"), (None, "*")).unwrap_err();
            assert_eq!(
                refused.to_string(),
                "there is no such kernel: `cargo xtask linux --kernel tests`"
            );
        }
    }

    #[test]
    fn tests_are_read_with_their_suites_and_complaints_without_numbers() {
        let said = Said::read(
            "KTAP version 1\n1..1\n    KTAP version 1\n    # Subtest: amdv1_fmt_test\n    1..2\n\
             \u{20}   ok 1 test_a # SKIP not here\n    not ok 2 test_b\n\
             not ok 1 amdv1_fmt_test\r\n\
             [    9.1] BUG: KCSAN: data-race in tick_do_update / tick_nohz_update\n\
             [    9.2] BUG: KCSAN: data-race in dmaspace_vtdss_map / dmaspace_vtdss_map\n\
             [   17.2] WARNING: CPU: 1 PID: 77 at drivers/iommu/x.c:12 f+0x10/0x20\n\
             === begins iommufd\nTAP version 13\nok 1 iommufd.simple.x\n=== ends 139\n",
        );
        let tests: Vec<(&str, End)> = said.tests.iter().map(|(k, v)| (k.as_str(), *v)).collect();
        assert_eq!(
            tests,
            [
                ("amdv1_fmt_test: test_a", End::Skipped),
                ("amdv1_fmt_test: test_b", End::Failed),
                ("iommufd: iommufd.simple.x", End::Passed),
            ]
        );
        let race = "[ # BUG: KCSAN: data-race in dmaspace_vtdss_map / dmaspace_vtdss_map";
        let warning = "[ # WARNING: CPU: # PID: # at # #";
        assert_eq!(said.complaints.iter().collect::<Vec<_>>(), [race, warning]);
        assert_eq!(
            said.broken,
            [
                "iommufd ended with  139",
                "the guest did not come to its end"
            ]
        );
    }
}
