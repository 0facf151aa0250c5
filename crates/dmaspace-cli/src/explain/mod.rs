//! `dmaspace explain`: from what an engineer has at hand, logs, tables, listings and configurations of any machine,
//! to the cause and the setting that helps.
//!
//! [`input`] opens files, folders, archives and compressed texts; [`read`] turns lines and tables into [`facts`],
//! faults into [`folds`]; [`rules`] turn facts into [`finding`]s; [`text`] prints them. Rules see facts and never
//! text, so that a cause never depends on the spelling of a line.

mod collect;
mod facts;
mod finding;
mod folds;
mod input;
mod line;
mod machine;
mod number;
mod read;
mod rules;
mod text;

use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use dmaspace::devices::{DevicesError, Places};
use indicatif::{ProgressBar, ProgressStyle};

use crate::draw::sheet::Paint;
use crate::json::json;
use crate::output::{exit, print, refuse};

use facts::Facts;
use finding::{Report, plain};
use input::{Input, Progress};

pub(crate) const ABOUT: &str = "Explains faults of IOMMUs and failed starts of virtual machines: reads kernel logs, lines of VFIO, QEMU, \
     libvirt and other monitors, /proc/iomem, /proc/cmdline, lspci, listings of groups, reserved regions and huge \
     pages, ACPI tables, dumps of I/O page tables, QEMU's command lines, libvirt's XML and memory layouts, in any \
     mixture, compressed, in folders and archives, from any machine. Reports each cause that the input shows, how \
     certain it is, its evidence, and the setting or command that helps.\n\n\
     --machine reads this machine's own files: the kernel's log and command line, groups, drivers and reserved regions, \
     ACPI tables, units, free huge pages, and virtual machines that run.\n\n\
     Requires no privilege, and changes nothing; of this machine, what only root can read is named. What is not \
     recognized is named, too.\n\n\
     Exit status: 0, also when something was found; 2 when an option is wrong or a file cannot be opened.";

pub(crate) const EXAMPLES: &str = "Examples:\n  \
     sudo dmesg | dmaspace explain\n  \
     dmaspace explain dmesg.txt groups.txt lspci.txt\n  \
     dmaspace explain sosreport.tar.xz --json | jq '.findings[0]'\n  \
     dmaspace explain error.txt domain.xml\n  \
     sudo dmaspace explain --machine domain.xml";

/// How often progress is shown.
const PROGRESS: Duration = Duration::from_millis(200);

/// The options of `dmaspace explain`.
#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// Files, folders and archives; without any and without --machine, or with -, standard input
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Read this machine's own files, too; each FILE is then of this machine
    ///
    /// Example: --machine domain.xml
    #[arg(long)]
    machine: bool,

    /// Write the files that --machine reads to FILE, for another person
    ///
    /// A .tar.gz that `dmaspace explain FILE` reads. Lists them first, and asks. Names of the machine and its
    /// users, addresses of its network and serial numbers are left out.
    ///
    /// Example: --collect machine.tar.gz
    #[arg(long, value_name = "FILE", conflicts_with_all = ["files", "machine", "json"])]
    collect: Option<PathBuf>,

    /// With --collect: do not ask
    ///
    /// Example: --yes --collect machine.tar.gz
    #[arg(long, requires = "collect")]
    yes: bool,

    /// Print the report as JSON
    ///
    /// Causes and names are stable. Nothing else is printed on stdout.
    ///
    /// Example: --json | jq '.findings[].cause'
    #[arg(long)]
    json: bool,
}

/// `dmaspace explain`.
pub(crate) fn run(args: &ExplainArgs) -> u8 {
    let done = match &args.collect {
        Some(file) => collect::run(file, args.yes),
        None => explain(args),
    };
    match done {
        Ok(()) => exit::RIGHT,
        Err(error) => refuse(&error),
    }
}

fn explain(args: &ExplainArgs) -> anyhow::Result<()> {
    let bar = io::stderr().is_terminal().then(|| {
        let style = ProgressStyle::with_template("{spinner} {msg}: {bytes}, {bytes_per_sec}");
        let bar = ProgressBar::new_spinner();
        bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()))
    });
    let mut shown = Instant::now();
    let mut progress = |file: &str, bytes: u64| {
        if let Some(bar) = bar.as_ref().filter(|_| shown.elapsed() > PROGRESS) {
            shown = Instant::now();
            bar.set_message(file.to_owned());
            bar.set_position(bytes);
        }
    };
    let mut input = Input::new(&mut progress);
    if args.files.is_empty() && !args.machine {
        input.stream("standard input", io::stdin().lock());
    }
    for path in &args.files {
        if path.as_os_str() == "-" {
            input.stream("standard input", io::stdin().lock());
        } else {
            input.path(path)?;
        }
    }
    if args.machine {
        machine::read(&mut input, &Places::default(), "/proc".as_ref())?;
    }
    let report = report(input.facts, input.files);
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    print(&if args.json {
        json(&report)?
    } else {
        text::report(&report, Paint::for_stdout())
    })
}

/// Explains any bytes as one file; for the fuzz target, which looks at what is printed.
pub fn explain_bytes(name: &str, bytes: &[u8]) -> (String, String) {
    let mut progress = |_: &str, _: u64| {};
    let report = of_bytes(name, bytes, &mut progress);
    let printed = text::report(&report, Paint::for_stdout());
    (printed, json(&report).unwrap_or_default())
}

/// Explains a machine whose files are at other places; for the fuzz target.
pub fn explain_machine(places: &Places, proc: &Path) -> Result<(String, String), DevicesError> {
    let report = of_machine(places, proc, &[])?;
    let printed = text::report(&report, Paint::for_stdout());
    Ok((printed, json(&report).unwrap_or_default()))
}

/// The report of a machine, with further files that are given.
fn of_machine(
    places: &Places,
    proc: &Path,
    given: &[(&str, &str)],
) -> Result<Report, DevicesError> {
    let mut progress = |_: &str, _: u64| {};
    let mut input = Input::new(&mut progress);
    for (name, text) in given {
        input.stream(name, text.as_bytes());
    }
    machine::read(&mut input, places, proc)?;
    Ok(report(input.facts, input.files))
}

fn of_bytes(name: &str, bytes: &[u8], progress: Progress<'_>) -> Report {
    let mut input = Input::new(progress);
    input.stream(name, bytes);
    report(input.facts, input.files)
}

/// Findings, and what was not understood.
fn report(mut facts: Facts, files: Vec<String>) -> Report {
    facts.translate();
    let findings = rules::findings(&mut facts);
    let mut report = Report {
        files,
        findings,
        notes: facts.notes.clone(),
        contents: facts
            .contents
            .iter()
            .map(|(file, kinds)| (*file, kinds.clone()))
            .collect(),
    };
    let notes = not_understood(&facts, &report);
    report
        .notes
        .extend(notes.into_iter().map(|note| plain(&note)));
    report
}

/// Notes on parts of the input that were not understood, or not kept.
fn not_understood(facts: &Facts, report: &Report) -> Vec<String> {
    let mut notes = Vec::new();
    for (file, known, lines, evidence) in &facts.unread {
        let name = report.files.get(*file).map_or("?", String::as_str);
        let first = report.place(&evidence.place);
        notes.push(match known {
            true => format!(
                "{name}: {lines} not read, the first is {first}: {}",
                evidence.quote
            ),
            false => format!(
                "{name}: it is not recognized ({lines} not read): {}",
                evidence.quote
            ),
        });
    }
    for dump in &facts.dumps {
        notes.push(format!(
            "{}: the tables of {} have {} rows of leaves",
            report.place(&dump.heading.place),
            dump.device,
            dump.rows.len()
        ));
    }
    for (evidence, count) in facts.unknown.values() {
        let more = match count {
            1 => String::new(),
            count => format!(", and {} more of its kind", count - 1),
        };
        notes.push(format!(
            "{}: it looks like a fault and is not decoded{more}: {}",
            report.place(&evidence.place),
            evidence.quote
        ));
    }
    notes.extend(failed_maps(facts, report));
    for (suppressed, evidence) in &facts.folds.orphans {
        notes.push(format!(
            "{}: {} messages of {} were suppressed, and no fault of this kind is in the file",
            report.place(&evidence.place),
            suppressed.callbacks,
            plain(&suppressed.function)
        ));
    }
    if facts.folds.beyond > 0 {
        notes.push(format!(
            "{} faults of further devices are not listed",
            facts.folds.beyond
        ));
    }
    for (kind, count) in &facts.dropped {
        notes.push(format!("{kind}: {count} more than are kept were left out"));
    }
    if facts.hidden_iomem {
        notes.push("/proc/iomem hides its addresses: read it as root".into());
    }
    notes
}

/// Notes on maps that have failed with an error that fits no cause.
fn failed_maps(facts: &Facts, report: &Report) -> Vec<String> {
    let mut notes = Vec::new();
    for one in &facts.lines {
        let facts::Line::MapFailed { errno, iommufd, .. } = one.fact else {
            continue;
        };
        if ![12, 22, 28].contains(&errno) {
            let place = report.place(&one.evidence.place);
            let why = match errno {
                // Linux drivers/iommu/iommufd/pages.c, pfn_reader_user_pin: pages of a device are not pinned.
                14 if iommufd => {
                    "a map ended with EFAULT: memory of a device (a BAR), which iommufd maps by a dma-buf only \
                     (VFIO_DEVICE_FEATURE_DMA_BUF, IOMMU_IOAS_MAP_FILE), or memory that is not there"
                }
                14 => {
                    "a map ended with EFAULT: memory that is not there or cannot be written (a file that is too short, a \
                     pool without free pages)"
                }
                17 => "a map ended with EEXIST: the range is mapped already",
                _ => "a map failed, and the error fits none of the causes",
            };
            notes.push(format!("{place}: {why} (error {errno})"));
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::explain_bytes;

    /// Lines of every reader.
    const SEEDS: [&str; 14] = [
        "[  10.5] DMAR: [DMA Write] Request device [00:12.0] fault addr 0 [fault reason 05] PTE Write access is not set\n",
        "[  50.2] DMAR: Dump dmar0 table entries for IOVA 0xfff00000\n[  50.2] DMAR: pte level: 1, pte value: 0x00000001deadb002\n",
        "[    5.1] arm-smmu-v3 arm-smmu-v3.0.auto: event 0x13 received:\n[    5.1] arm-smmu-v3 arm-smmu-v3.0.auto: \t0x0000000700000013\n",
        "dmar_fault: 31 callbacks suppressed\nSEV-SNP: RMPUPDATE failed for PFN 1a2b3, pg_level: 2, ret: 4\n",
        "vfio_container_dma_map(0x1, 0x380000000000, 0x1000, 0x2) = -22 (Invalid argument)\n0x0 0x7fffffffff\n",
        "1 0000:01:00.0 030000 10de:1187 vfio-pci\n1 0000:01:00.1 040300 10de:0e0a snd_hda_intel\n",
        "A ram 0x0 0xfee01000\nA bar 0000:01:00.0 0xe000000000 0x2000000000\n0x00000000fee00000 0x00000000feefffff msi\n",
        "kvm -m 4G -object memory-backend-file,id=a,size=4G,mem-path=/dev/hugepages,policy=bind,host-nodes=0 -device vfio-pci,host=01:00.0\n",
        "<domain><memory unit='GiB'>4</memory><devices><hostdev type='pci'><source><address bus='1'/></source></hostdev></devices></domain>\n",
        "root=/dev/sda1 iommu=pt iommu.passthrough=0 amd_iommu=on\n",
        "1 map 0x1000 0x1000 rw fd\n2 unmap 0x0 0x4000\n3 config-write command mem=0\n4 device-dma 0x1000 -> fault\n",
        "# target 4096\nA 0 1000 4000 4000\nA 1 1100 3900 3900\n",
        "Device 0000:00:1f.0 @0x105407000\nIOVA_PFN PML5E PML4E PDPE PDE PTE\n0x1 | 0x0 0x105408003 0x105409003 0x10540a003 0x1003\n",
        "01:00.0 3D controller [0302]: x [10de:1]\n\tRegion 2: Memory at 20000000000 (64-bit) [size=128G]\n\tIOMMU group: 1\n",
    ];

    /// Texts that a shell would run, or a terminal obey, in the places of names, drivers and addresses.
    #[test]
    fn nothing_of_an_input_is_a_command() {
        const HOSTILE: [&str; 6] = [
            "$(reboot)",
            "`reboot`",
            "a;reboot",
            "a'b\"c",
            "\u{1b}[2J\u{202e}x",
            "a|reboot&\u{7}",
        ];
        for name in HOSTILE {
            let input = format!(
                "1 0000:01:00.0 030000 10de:1187 vfio-pci\n1 0000:01:00.1 040300 10de:0e0a {name}\n\
                 1 0000:01:00.2{name} 040300 10de:0e0a snd\n\
                 IOMMU Group 2 0000:02:00.0{name} VGA [0300]: {name}\n\
                 01:00.0 3D controller [0302]: {name} [10de:1]\n\tKernel driver in use: {name}\n\
                 [  1.0] {name} 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x000d address=0x1000 flags=0x0070]\n\
                 qemu: vfio 0000:01:00.0{name}: group 1 is not viable {name}\n\
                 qemu-system-x86_64 -name {name} -m 4G -readconfig {name} -device vfio-pci,host=01:00.0,id={name}\n\
                 root=/dev/sda1 iommu={name} iommu=pt amd_iommu={name} amd_iommu={name}2\n\
                 A bar 0000:01:00.0{name} 0xfee00000 0x1000\n{name} ram 0x0 0xfee01000\n\
                 0x00000000fee00000 0x00000000feefffff {name}\n"
            );
            for file in ["input.txt", name] {
                let (text, json) = explain_bytes(file, input.as_bytes());
                let report: serde_json::Value = serde_json::from_str(&json).unwrap();
                let findings = report["findings"].as_array().unwrap();
                assert!(findings.len() > 2, "{json}");
                let advice = findings
                    .iter()
                    .flat_map(|one| one["advice"].as_array().unwrap());
                for advice in advice.map(|one| one.as_str().unwrap()) {
                    // Parts outside of quotes.
                    let bare: String = advice.split('\'').step_by(2).collect();
                    for part in ["$(", "`reboot", ";reboot", "|reboot"] {
                        assert!(!bare.contains(part), "{advice}");
                    }
                    assert!(advice.chars().all(|c| !c.is_control()), "{advice:?}");
                }
                let hidden = |c: char| c != '\n' && c.is_control() || c == '\u{202e}';
                assert!(!text.contains(hidden), "{text:?}");
            }
        }
    }

    #[test]
    fn reports_of_any_bytes_are_json() {
        let mut random = fastrand::Rng::with_seed(2);
        for _ in 0..400 {
            let mut bytes: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(64).collect();
            bytes.extend(random.choice(SEEDS).unwrap_or_default().as_bytes());
            bytes.extend(std::iter::repeat_with(|| random.u8(..)).take(64));
            let name = String::from_utf8_lossy(&bytes).into_owned();
            let (_, json) = explain_bytes(&name, &bytes);
            let report: serde_json::Value = serde_json::from_str(&json).unwrap();
            assert!(report["findings"].is_array(), "{json}");
        }
    }

    #[test]
    fn mutated_inputs_are_explained_without_a_panic() {
        let mut random = fastrand::Rng::with_seed(1);
        for round in 0..4000 {
            let mut bytes = Vec::new();
            for _ in 0..random.usize(1..4) {
                bytes.extend(random.choice(SEEDS).unwrap_or_default().as_bytes());
            }
            for _ in 0..random.usize(0..6) {
                let at = random.usize(0..bytes.len());
                match random.u8(0..5) {
                    0 => bytes[at] = random.u8(..),
                    1 => {
                        bytes.remove(at);
                    }
                    2 => bytes.insert(
                        at,
                        *random.choice(b"0f9-,:=[]() \n\t'\"\\{").unwrap_or(&b' '),
                    ),
                    3 => bytes.truncate(at.max(1)),
                    _ => bytes.splice(at..at, *b"ffffffffffffffff").for_each(drop),
                }
                if bytes.is_empty() {
                    bytes.push(b'\n');
                }
            }
            let (text, json) = explain_bytes("input", &bytes);
            assert!(
                text.chars().all(|c| c == '\n' || !c.is_control()),
                "{round}: {text:?}"
            );
            assert!(json.is_ascii(), "{round}");
        }
    }
}
