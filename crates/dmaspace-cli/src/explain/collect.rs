//! Archive of a machine for another person: the files that `explain --machine` reads, without private data.
//!
//! The archive has the files as they lie in `/sys`, `/proc` and `/dev`, links by the last name that they lead to, and
//! first [`MARK`], by which `explain` knows it. Only parts are taken of some files: lines of the kernel's log that a
//! reader asks for, options of a monitor's command line that decide about memory and devices, and a device's
//! configuration space without its serial number. All texts go through [`Private`].

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind, IsTerminal as _, Write};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, bail};
use dmaspace::devices::Places;
use hostmem::read_at_most;

use super::machine::{TABLES, kernel_log};
use super::read::Concerned;
use crate::devices::units::{extended, names, text};
use crate::inspect::memory_arguments;
use crate::output::print;
use crate::private::Private;
use crate::size::{bytes, counted};

/// The first file of the archive.
pub(super) const MARK: &str = "dmaspace-machine.txt";
/// The longest file that is taken.
const MOST: u64 = 16 << 20;

/// Texts below `/sys`.
const TEXTS: [&str; 20] = [
    "bus/pci/devices/*/class",
    "bus/pci/devices/*/vendor",
    "bus/pci/devices/*/device",
    "bus/pci/devices/*/numa_node",
    "bus/pci/devices/*/resource",
    "class/iommu/*/intel-iommu/cap",
    "class/iommu/*/intel-iommu/ecap",
    "class/iommu/*/amd-iommu/cap",
    "class/iommu/*/amd-iommu/features",
    "devices/system/node/node*/hugepages/*/free_hugepages",
    "kernel/iommu_groups/*/name",
    "kernel/iommu_groups/*/reserved_regions",
    "kernel/iommu_groups/*/type",
    "kernel/mm/hugepages/*/free_hugepages",
    "kernel/mm/hugepages/*/nr_overcommit_hugepages",
    "kernel/mm/hugepages/*/resv_hugepages",
    "kernel/mm/hugepages/*/surplus_hugepages",
    "kernel/mm/transparent_hugepage/enabled",
    "module/iommu/parameters/*",
    "module/vfio_iommu_type1/parameters/*",
];
/// Links of a device.
const LINKS: [&str; 3] = ["driver", "iommu", "iommu_group"];
/// Names alone.
const FOLDERS: [&str; 4] = [
    "bus/pci/devices/*/vfio-dev/*",
    "bus/pci/drivers/vfio-pci",
    "class/iommu/*",
    "firmware/acpi/tables/*",
];

/// A file of the archive.
struct Part {
    path: String,
    /// The pattern that it is one of.
    kind: String,
    content: Content,
}

enum Content {
    Bytes(Vec<u8>),
    Link(String),
    Folder,
}

/// All that is taken.
pub(super) struct Collection {
    parts: Vec<Part>,
    /// Files that root alone can read.
    refused: Vec<String>,
    private: Private,
}

impl Collection {
    pub(super) fn read(places: &Places, proc: &Path, private: Private) -> Self {
        let mut new = Self {
            parts: Vec::new(),
            refused: Vec::new(),
            private,
        };
        let sys = places.sys.as_path();
        for pattern in FOLDERS {
            for path in matching(sys, pattern) {
                new.add("sys", path, pattern, Content::Folder);
            }
        }
        for pattern in TEXTS {
            for path in matching(sys, pattern) {
                new.text(sys, "sys", path, pattern);
            }
        }
        for device in matching(sys, "bus/pci/devices/*") {
            new.device(sys, &device);
        }
        for member in matching(sys, "kernel/iommu_groups/*/devices/*") {
            let kind = "kernel/iommu_groups/*/devices/*";
            new.add("sys", member.clone(), kind, Content::Folder);
            new.link(sys, &format!("{member}/driver"), &format!("{kind}/driver"));
        }
        for name in TABLES {
            let path = format!("firmware/acpi/tables/{name}");
            new.whole(sys, "sys", path.clone(), &path, |bytes| bytes);
        }
        new.text(proc, "proc", "cmdline".into(), "cmdline");
        if let Some(Content::Bytes(line)) = new.parts.last_mut().map(|part| &mut part.content) {
            let end = line.windows(4).position(|part| part == b" -- ");
            line.truncate(end.unwrap_or(line.len()));
        }
        for name in ["version", "iomem"] {
            new.text(proc, "proc", name.into(), name);
        }
        new.log(&places.dev.join("kmsg"));
        for name in ["vfio/vfio", "iommu"] {
            if places.dev.join(name).exists() {
                new.add("dev", name.into(), name, Content::Bytes(Vec::new()));
            }
        }
        new.monitors(proc);
        new
    }

    fn add(&mut self, top: &str, path: String, kind: &str, content: Content) {
        self.parts.push(Part {
            path: format!("{top}/{path}"),
            kind: format!("{top}/{kind}"),
            content,
        });
    }

    /// Takes a file as `change` leaves it.
    fn whole(
        &mut self,
        root: &Path,
        top: &str,
        path: String,
        kind: &str,
        change: impl FnOnce(Vec<u8>) -> Vec<u8>,
    ) {
        match read_at_most(root.join(&path), MOST) {
            Ok(bytes) => self.add(top, path, kind, Content::Bytes(change(bytes))),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                self.refused.push(format!("{top}/{path}"));
            }
            // A file that is not there, or is gone.
            Err(_) => {}
        }
    }

    fn text(&mut self, root: &Path, top: &str, path: String, kind: &str) {
        let mut private = std::mem::take(&mut self.private);
        let change = |bytes: Vec<u8>| {
            private
                .without(&String::from_utf8_lossy(&bytes))
                .into_bytes()
        };
        self.whole(root, top, path, kind, change);
        self.private = private;
    }

    fn link(&mut self, root: &Path, path: &str, kind: &str) {
        let target = fs::read_link(root.join(path)).ok();
        let name = target.as_deref().and_then(Path::file_name);
        if let Some(name) = name.and_then(|name| name.to_str()) {
            self.add("sys", path.to_owned(), kind, Content::Link(name.to_owned()));
        }
    }

    fn device(&mut self, sys: &Path, device: &str) {
        for link in LINKS {
            self.link(
                sys,
                &format!("{device}/{link}"),
                &format!("bus/pci/devices/*/{link}"),
            );
        }
        let path = format!("{device}/config");
        self.whole(sys, "sys", path, "bus/pci/devices/*/config", without_serial);
    }

    fn log(&mut self, path: &Path) {
        match kernel_log(path) {
            Ok(log) => {
                let mut concerned = Concerned::default();
                let lines = log.lines().filter(|line| concerned.takes(line));
                let text: String = lines.flat_map(|line| [kernels(line), "\n"]).collect();
                let text = self.private.without(&text);
                self.add(
                    "dev",
                    "kmsg".into(),
                    "kmsg",
                    Content::Bytes(text.into_bytes()),
                );
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(_) => self
                .refused
                .push("dev/kmsg (the kernel's log, and faults in it)".into()),
        }
    }

    /// Command lines and limits of monitors that run.
    fn monitors(&mut self, proc: &Path) {
        for process in names(proc)
            .iter()
            .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
        {
            let line = read_at_most(proc.join(process).join("cmdline"), MOST).unwrap_or_default();
            let words = line.split(|byte| *byte == 0);
            let words: Vec<_> = words
                .map(|word| String::from_utf8_lossy(word).into_owned())
                .collect();
            let Some(kept) = memory_arguments(&words) else {
                continue;
            };
            let line = self.private.without(&kept.join("\0")).into_bytes();
            self.add(
                "proc",
                format!("{process}/cmdline"),
                "*/cmdline",
                Content::Bytes(line),
            );
            let limits = text(&proc.join(process).join("limits")).unwrap_or_default();
            let locked = limits
                .lines()
                .find(|line| line.starts_with("Max locked memory"));
            if let Some(locked) = locked {
                let content = Content::Bytes(locked.as_bytes().to_vec());
                self.add("proc", format!("{process}/limits"), "*/limits", content);
            }
        }
    }

    /// The files by kind, the private data that is left out, and the files that root would add.
    pub(super) fn summary(&self) -> String {
        let mut kinds: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        for part in &self.parts {
            let (count, size) = kinds.entry(&part.kind).or_default();
            *count += 1;
            *size += match &part.content {
                Content::Bytes(bytes) => bytes.len() as u64,
                Content::Link(name) => name.len() as u64,
                Content::Folder => 0,
            };
        }
        let mut out = String::from("It takes:\n");
        for (kind, (count, size)) in kinds {
            out += &format!("  /{kind}: {}, {}\n", counted(count, "file"), bytes(size));
        }
        let left: Vec<_> = self
            .private
            .left_out
            .iter()
            .map(|(kind, count)| format!("{} {count}", kind.word()))
            .collect();
        out += &match left.as_slice() {
            [] => "Nothing private was found in it.\n".to_owned(),
            left => format!("Words replace private contents: {}.\n", left.join(", ")),
        };
        if !self.refused.is_empty() {
            out += &format!("As root it would also take: {}.\n", self.refused.join(", "));
        }
        out
    }

    /// Writes the archive.
    pub(super) fn write(&self, out: impl Write) -> io::Result<()> {
        let gzip = flate2::write::GzEncoder::new(out, flate2::Compression::default());
        let mut tar = tar::Builder::new(gzip);
        let text = format!("dmaspace {}\n{}", env!("CARGO_PKG_VERSION"), self.summary());
        append(&mut tar, MARK, text.as_bytes())?;
        for part in &self.parts {
            match &part.content {
                Content::Bytes(bytes) => append(&mut tar, &part.path, bytes)?,
                Content::Link(name) => {
                    let mut header = header(tar::EntryType::Symlink, 0);
                    tar.append_link(&mut header, &part.path, name)?;
                }
                Content::Folder => {
                    let mut header = header(tar::EntryType::Directory, 0);
                    tar.append_data(&mut header, &part.path, io::empty())?;
                }
            }
        }
        tar.into_inner()?.finish()?.flush()
    }
}

/// A line without what follows a command line of the kernel: arguments of the first program.
fn kernels(line: &str) -> &str {
    match line.contains("ommand line: ") {
        true => line.split(" -- ").next().unwrap_or(line),
        false => line,
    }
}

/// A header without times and owners.
fn header(kind: tar::EntryType, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(0o644);
    header
}

fn append(tar: &mut tar::Builder<impl Write>, path: &str, bytes: &[u8]) -> io::Result<()> {
    let mut header = header(tar::EntryType::Regular, bytes.len() as u64);
    tar.append_data(&mut header, path, bytes)
}

/// Paths below `root` that fit, relative to it; `*` at the end of a name stands for any rest.
fn matching(root: &Path, pattern: &str) -> Vec<String> {
    let mut found = vec![String::new()];
    for part in pattern.split('/') {
        let mut next = Vec::new();
        for path in &found {
            let join = |name: &str| match path.as_str() {
                "" => name.to_owned(),
                path => format!("{path}/{name}"),
            };
            match part.strip_suffix('*') {
                Some(start) => {
                    let names = names(&root.join(path));
                    next.extend(
                        names
                            .iter()
                            .filter(|name| name.starts_with(start))
                            .map(|name| join(name)),
                    );
                }
                None => next.extend(
                    Some(join(part)).filter(|path| root.join(path).symlink_metadata().is_ok()),
                ),
            }
        }
        found = next;
    }
    found
}

/// A configuration space without the serial number, which is often the address of the device in a network. PCI Express
/// 6.0, section 7.9.3 "Device Serial Number Extended Capability": number 3, eight bytes at 4.
fn without_serial(mut space: Vec<u8>) -> Vec<u8> {
    for (number, at) in extended(&space) {
        if let (3, Some(serial)) = (number, space.get_mut(at + 4..at + 12)) {
            serial.fill(0);
        }
    }
    space
}

/// The path of an entry, if it leads to a place within the folder that it is unpacked in.
pub(super) fn inner(path: &Path) -> Option<PathBuf> {
    const DEEPEST: usize = 16;
    let parts: Vec<_> = path.components().collect();
    let plain = parts
        .iter()
        .all(|part| matches!(part, Component::Normal(_)));
    (plain && !parts.is_empty() && parts.len() <= DEEPEST).then(|| path.to_owned())
}

/// `dmaspace explain --collect FILE`.
pub(super) fn run(file: &Path, yes: bool) -> anyhow::Result<()> {
    let private = Private::of_this_machine();
    let collection = Collection::read(&Places::default(), "/proc".as_ref(), private);
    print(&collection.summary())?;
    if !yes {
        if !io::stdin().is_terminal() {
            bail!("nothing is written: without a terminal to ask at, --yes is required");
        }
        print(&format!("Write this to {}? [y/N] ", file.display()))?;
        let mut answer = String::new();
        io::stdin().read_line(&mut answer)?;
        if !matches!(answer.trim(), "y" | "Y" | "yes") {
            bail!("nothing was written");
        }
    }
    let failed = || format!("cannot write {}", file.display());
    let out = fs::File::create_new(file).with_context(failed)?;
    collection.write(out).with_context(failed)?;
    print(&format!(
        "{} is written: `dmaspace explain {}` reads it.\n",
        file.display(),
        file.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::super::finding::Report;
    use super::super::input::Input;
    use super::super::{of_machine, report};
    use super::*;
    use crate::test_files::Files;

    const SECRETS: [&str; 10] = [
        "hunter2",
        "build7",
        "ahmet",
        "Yildiz",
        "CZ12345",
        "52:54:00:12:34:56",
        "192.0.2.7",
        "0a1b2c3d-0000-1111-2222-333344445555",
        "payroll",
        "secret.img",
    ];

    /// A machine with a fault, a group that a driver of the host blocks, and private words in every text.
    fn machine() -> Files {
        let files = Files::new();
        let secrets = "build7 ahmet@build7 192.0.2.7 52:54:00:12:34:56 serial=CZ12345";
        files
            .file("proc/sys/kernel/hostname", "build7\n")
            .file("etc/passwd", "ahmet:x:1000:1000:Ahmet Yildiz:/home/ahmet:/bin/sh\n")
            .file("proc/cmdline", "root=UUID=0a1b2c3d-0000-1111-2222-333344445555 intel_iommu=on iommu=pt iommu.passthrough=0 ip=192.0.2.7 -- --token hunter2\n")
            .file("proc/version", "Linux version 6.8.0 (ahmet@build7) (gcc) #1\n")
            .file("proc/iomem", "00100000-7fffffff : System RAM\n")
            .file(
                "dev/kmsg",
                format!(
                    "3,1,1000000,-;DMAR: [DMA Read NO_PASID] Request device [01:00.0] fault addr 0x7000 [fault reason 0x06] PTE Read access is not set {secrets}\n\
                     6,2,1500000,-;Command line: root=/dev/sda1 -- hunter2\n\
                     6,2,2000000,-;sshd: payroll of ahmet from 192.0.2.7\n\
                     3,3,3000000,-;vfio-pci 0000:01:00.0: Yildiz\n"
                ),
            )
            .file(
                "proc/77/cmdline",
                "/usr/bin/qemu-system-x86_64\0-name\0payroll\0-m\x004G\0-drive\0file=/home/ahmet/secret.img\0-device\0vfio-pci,host=01:00.0\0-netdev\0user,hostname=payroll\0",
            )
            .file("proc/77/limits", "Limit  Soft Limit  Hard Limit  Units\nMax locked memory  65536  65536  bytes\n");
        let mut config = vec![0u8; 4096];
        config[0x100..0x104].copy_from_slice(&0x1101_0003u32.to_le_bytes());
        config[0x104..0x10c].copy_from_slice(b"CZ12345\0");
        config[0x110..0x114].copy_from_slice(&0x0001_000fu32.to_le_bytes());
        for (device, driver) in [
            ("0000:01:00.0", "vfio-pci"),
            ("0000:01:00.1", "snd_hda_intel"),
        ] {
            let path = format!("sys/bus/pci/devices/{device}");
            files.pci(&path, 0x02_0000, 0);
            files.file(&format!("{path}/config"), &config);
            files.directory(&format!("sys/bus/pci/drivers/{driver}"));
            files.link(
                &format!("{path}/driver"),
                files.path(&format!("sys/bus/pci/drivers/{driver}")),
            );
            files.link(
                &format!("{path}/iommu_group"),
                files.path("sys/kernel/iommu_groups/4"),
            );
            files.link(
                &format!("sys/kernel/iommu_groups/4/devices/{device}"),
                files.path(&path),
            );
        }
        files.file("sys/kernel/iommu_groups/4/type", "DMA\n");
        files.file(
            "sys/kernel/iommu_groups/4/reserved_regions",
            "0xfee00000 0xfeefffff msi\n",
        );
        files.file(
            "sys/kernel/mm/transparent_hugepage/enabled",
            "always madvise [never]\n",
        );
        files.file(
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages",
            "8\n",
        );
        files
    }

    fn archive(files: &Files) -> Vec<u8> {
        let private = Private::read(&files.path(""));
        let collection = Collection::read(&files.places(), &files.path("proc"), private);
        let mut out = Vec::new();
        collection.write(&mut out).unwrap();
        out
    }

    fn told(report: &Report) -> Vec<(String, Vec<String>, Option<u64>)> {
        let findings = report.findings.iter();
        findings
            .map(|one| (one.cause.to_owned(), one.devices.clone(), one.count))
            .collect()
    }

    #[test]
    fn an_archive_says_what_the_machine_says() {
        let files = machine();
        let mut progress = |_: &str, _: u64| {};
        let mut input = Input::new(&mut progress);
        input.stream("a.tar.gz", archive(&files).as_slice());
        let read = report(input.facts, input.files);
        let direct = of_machine(&files.places(), &files.path("proc"), &[]).unwrap();
        assert_eq!(told(&read), told(&direct));
        for cause in [
            "fault.no-access",
            "group.not-viable",
            "option.repeated",
            "pages.transparent-off",
            "group.strict",
        ] {
            assert!(
                told(&read).iter().any(|(told, ..)| told == cause),
                "{cause}: {:?}",
                told(&read)
            );
        }
        let shown = |file: &String| !file.contains("/tmp");
        assert!(read.files.iter().all(shown), "{:?}", read.files);
    }

    #[test]
    fn nothing_private_is_in_an_archive() {
        let packed = archive(&machine());
        let mut tar = Vec::new();
        io::Read::read_to_end(
            &mut flate2::read::GzDecoder::new(packed.as_slice()),
            &mut tar,
        )
        .unwrap();
        let text = String::from_utf8_lossy(&tar).to_lowercase();
        for secret in SECRETS {
            assert!(!text.contains(&secret.to_lowercase()), "{secret}");
        }
        assert!(text.contains("fault addr 0x7000") && text.contains("vfio-pci,host=01:00.0"));
    }

    #[test]
    fn a_link_of_an_archive_leads_to_no_file_of_this_machine() {
        let mut tar = tar::Builder::new(Vec::new());
        append(&mut tar, MARK, b"dmaspace\n").unwrap();
        let group = "sys/kernel/iommu_groups/1";
        for path in ["proc/cmdline", &format!("{group}/type"), "dev/kmsg"] {
            let mut header = header(tar::EntryType::Symlink, 0);
            tar.append_link(&mut header, path, "/proc/version").unwrap();
        }
        let mut progress = |_: &str, _: u64| {};
        let mut input = Input::new(&mut progress);
        input.stream("a.tar", tar.into_inner().unwrap().as_slice());
        let read = report(input.facts, input.files);
        let printed = crate::json::json(&read).unwrap();
        assert!(!printed.contains("Linux version"), "{printed}");
        assert!(
            read.notes
                .iter()
                .any(|note| note.starts_with("a.tar:/proc/cmdline: ")),
            "{printed}"
        );
    }

    #[test]
    fn entries_that_lead_out_are_not_unpacked() {
        for (path, good) in [
            ("sys/a", true),
            ("../a", false),
            ("/etc/a", false),
            ("sys/../../a", false),
            ("", false),
        ] {
            assert_eq!(inner(path.as_ref()).is_some(), good, "{path}");
        }
    }
}
