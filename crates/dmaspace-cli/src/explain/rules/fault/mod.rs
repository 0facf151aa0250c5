//! Faults as a unit reported them, and the reasons behind them.
//!
//! The class of a record is certain where the unit's specification says so; reasons behind it are never more than
//! likely, but for a direction that a dump of the leaf shows (see [`table`](super::table)). `record` writes the class
//! of each fold; `reason`, `mapping` and `scanout` add reasons, each from the folds alone.

mod mapping;
mod reason;
mod record;
mod scanout;

use iommu::log::Family;

use super::super::facts::{Driver, Facts};
use super::super::finding::{Advice, Finding};
use super::super::folds::Fold;
use super::super::number::pci;

pub(super) use mapping::absent_in_dump;

/// Addresses that Linux's allocator gives first: from 4 GiB downwards. Source: Linux 7.2 `drivers/iommu/dma-iommu.c`,
/// `iommu_dma_alloc_iova` (32 bits first, unless `iommu.forcedac`), `drivers/iommu/iova.c`, `__alloc_and_insert_iova_range`.
const ALLOCATOR: std::ops::RangeInclusive<u64> = 0xe000_0000..=0xffff_ffff;
/// Interrupt messages of x86-64: Intel SDM volume 3, section 12.11.1 "Message Address Register Format".
const MSI: std::ops::RangeInclusive<u64> = 0xfee0_0000..=0xfeef_ffff;

pub(super) fn findings(facts: &Facts, found: &mut Vec<Finding>) {
    for fold in &facts.folds.folds {
        found.push(record::reported(facts, fold));
    }
    for fold in &facts.folds.folds {
        reason::reasons(facts, fold, found);
    }
    scanout::scanout(facts, found);
}

fn likely(fold: &Fold, cause: &'static str, source: &'static str) -> Finding {
    let mut finding = Finding::likely(cause, source).evidence(&fold.evidence);
    if !fold.device.is_empty() {
        finding = finding.device(fold.device.clone());
    }
    finding.access = fold.key.direction;
    finding.addresses_complete = fold.more_addresses == 0;
    finding
}

/// The most addresses that a reason lists.
const MOST_OF_REASON: usize = 64;

fn of_addresses(mut finding: Finding, addresses: &[u64]) -> Finding {
    finding.addresses_complete &= addresses.len() <= MOST_OF_REASON;
    for address in addresses.iter().take(MOST_OF_REASON) {
        finding = finding.range(*address, *address);
    }
    finding
}

fn who(fold: &Fold) -> String {
    match fold.device.as_str() {
        "" => "The device".into(),
        device if device.starts_with("0x") => {
            format!("The device with {} {device}", number_name(fold.key.family))
        }
        device => device.to_owned(),
    }
}

/// The name of a device's number.
const fn number_name(family: Family) -> &'static str {
    match family {
        Family::SmmuV2 | Family::SmmuV3 => "stream ID",
        _ => "number",
    }
}

/// Giver of a device's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum User {
    /// A driver of the host.
    Host,
    /// A guest, or another program, by VFIO.
    Guest,
    /// The input does not name the driver.
    Unknown,
}

/// The user of a device. The line of the fault has the driver of its time; a listing may be of a later one.
fn user(facts: &Facts, fold: &Fold) -> User {
    let device = fold.device.as_str();
    if !fold.drivers.is_empty() {
        return match fold.drivers.iter().any(|driver| driver.contains("vfio")) {
            true => User::Guest,
            false => User::Host,
        };
    }
    if facts.is_given(device) {
        return User::Guest;
    }
    let driver = facts.known(device, None).map(|known| known.fact.driver);
    // A device without a PCI address is one of a platform, unless a number alone is known.
    let named = !device.is_empty() && !device.starts_with("0x") && !device.contains(':');
    match driver {
        Some(Driver::None | Driver::Bound(_)) => User::Host,
        _ if named => User::Host,
        _ => User::Unknown,
    }
}

/// False where the addresses are a guest's, as far as the input tells.
fn is_hosts(facts: &Facts, fold: &Fold) -> bool {
    user(facts, fold) != User::Guest
}

/// Advice for the driver of the host, with its condition where the driver is not known.
fn for_driver(facts: &Facts, fold: &Fold, finding: Finding, text: &str) -> Finding {
    match (user(facts, fold), listed(fold)) {
        (User::Guest, _) => finding,
        (User::Host, _) => finding.advise(Advice::text(text)),
        (_, Some(command)) => finding.advise(Advice::text(format!(
            "If it is not passed through ({command}): {text}"
        ))),
        _ => finding.advise(Advice::text(format!("If it is not passed through: {text}"))),
    }
}

/// The command that shows a device's driver.
fn listed(fold: &Fold) -> Option<String> {
    let device = fold.device.as_str();
    let device = device.strip_prefix("0000:").unwrap_or(device);
    (device.contains(':') && pci(device).is_some()).then(|| format!("lspci -k -s {device}"))
}

/// The file in which a kernel may show the device's tables: VT-d's driver is the only one that has such files.
///
/// Source: Linux `drivers/iommu/intel/debugfs.c`, `intel_iommu_debugfs_create_dev` (since 6.7; before, one file for all).
fn tables_file(fold: &Fold) -> Option<String> {
    let shown = fold.key.family == Family::Vtd && fold.device.contains(':');
    shown.then(|| {
        format!(
            "/sys/kernel/debug/iommu/intel/{}/domain_translation_struct",
            fold.device
        )
    })
}

/// A walk of the tables, where they can be read.
fn walked(fold: &Fold, address: u64, finding: Finding) -> Finding {
    match tables_file(fold) {
        Some(file) => finding
            .advise(Advice::text(
                "While it faults, where the kernel has CONFIG_INTEL_IOMMU_DEBUGFS (Linux 6.7 or newer), as root:",
            ))
            .advise(Advice::Command(vec![
                "dmaspace".into(),
                "tables".into(),
                "walk".into(),
                file,
                format!("{address:#x}"),
            ])),
        None => finding,
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::Certainty;
    use super::super::{causes, of_text};

    const READ: &str = "DMAR: [DMA Read NO_PASID] Request device [XX] fault addr YY [fault reason 0x06] PTE Read access is not set";

    fn read(device: &str, address: &str) -> String {
        READ.replace("XX", device).replace("YY", address)
    }

    #[test]
    fn a_walk_is_advised_where_a_kernel_shows_tables() {
        let walks = |text: &str| {
            let found = of_text(&format!("[ 100.1] {text}\n"));
            let advice = found.iter().flat_map(|one| &one.advice);
            let lines: Vec<_> = advice.map(|one| one.line()).collect();
            lines
                .into_iter()
                .find(|line| line.starts_with("dmaspace tables walk"))
        };
        let file = "/sys/kernel/debug/iommu/intel/0000:03:00.0/domain_translation_struct";
        let vtd = walks(&read("03:00.0", "0xffff1000"));
        assert_eq!(vtd, Some(format!("dmaspace tables walk {file} 0xffff1000")));
        for other in [
            "nvme 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x000e address=0xcff49550 flags=0x0070]",
            "AMD-Vi: Event logged [PAGE_TAB_HARDWARE_ERROR device=02:00.0 domain=0x0003 address=0x1000 flags=0x0020]",
            "DMAR: [DMA Read NO_PASID] Request device [03:00.0] fault addr 0x1000000 [fault reason 0x02] Present bit in context entry is clear",
        ] {
            assert_eq!(walks(other), None, "{other}");
        }
    }

    #[test]
    fn faults_of_one_kind_are_one_finding_with_a_lower_bound() {
        let text = format!(
            "[ 100.0] dmar_fault: 31 callbacks suppressed\n[ 100.1] {0}\n[ 100.2] {0}\n",
            read("03:00.0", "0x7000")
        );
        let found = of_text(&text);
        assert_eq!(causes(&found), ["fault.no-access"]);
        assert_eq!((found[0].count, found[0].count_exact), (Some(12), false));
        assert_eq!(found[0].devices, ["0000:03:00.0"]);
    }

    #[test]
    fn reasons_are_likely_and_have_evidence() {
        let zero = of_text(&format!("[ 100.1] {}\n", read("03:00.0", "0x0")));
        assert_eq!(causes(&zero), ["fault.no-access", "fault.null-address"]);
        assert_eq!(zero[1].certainty, Certainty::Likely);
        let recent = of_text(&format!("[ 100.1] {}\n", read("03:00.0", "0xffff1000")));
        assert_eq!(
            causes(&recent),
            ["fault.no-access", "fault.wrong-direction"]
        );
        let given = of_text(&format!(
            "[ 100.1] vfio-pci 0000:03:00.0: x\n[ 100.1] {}\n03:00.0 x [0200]: y [8086:1]\n\tKernel driver in use: vfio-pci\n",
            read("03:00.0", "0xffff1000")
        ));
        assert_eq!(causes(&given), ["fault.no-access"]);
    }

    #[test]
    fn addresses_beyond_those_that_are_kept_are_told() {
        let lines = |pages: u64| {
            // Not in order, so that the last ones are within.
            let addresses = (0..pages).map(|nth| 0x1_0000_0000 + (nth * 7 % pages) * 0x2000);
            let lines = addresses
                .map(|address| format!("[ 100.1] {}\n", read("3b:00.0", &format!("{address:#x}"))));
            lines.collect::<String>()
        };
        let all = of_text(&lines(1024));
        assert!(all[0].addresses_complete);
        assert!(
            all[0].text.contains(" at 1024 addresses between "),
            "{}",
            all[0].text
        );
        let cut = of_text(&lines(3000));
        assert!(!cut[0].addresses_complete);
        let text = "at more than 1024 addresses between 0x100000000 and 0x10176e000 ";
        assert!(cut[0].text.contains(text), "{}", cut[0].text);
        let text = "1024 addresses are listed; 1976 faults were at others.";
        assert!(cut[0].text.contains(text), "{}", cut[0].text);
    }

    #[test]
    fn a_stream_without_an_entry_is_one_of_firmware() {
        let unit = "[ 5.1] arm-smmu-v3 arm-smmu-v3.0.auto:";
        let text = [
            "event 0x02 received:",
            "\t0x0000010000000002",
            "\t0x0",
            "\t0x0",
            "\t0x0",
        ]
        .map(|line| format!("{unit} {line}\n"));
        let found = of_text(&text.concat());
        assert_eq!(causes(&found), ["fault.device-entry"]);
        assert!(
            found[0].text.contains("the device with stream ID 0x100 "),
            "{}",
            found[0].text
        );
        let lines: Vec<_> = found[0].advice.iter().map(|one| one.line()).collect();
        assert!(lines[1].contains("tables/IORT beside the log"), "{lines:?}");
        assert!(lines[1].ends_with("here 01:00.0."), "{lines:?}");
        assert!(lines[0].contains("iommu-map"), "{lines:?}");
        assert!(
            !lines.concat().contains("attached to no domain"),
            "{lines:?}"
        );
    }

    #[test]
    fn a_line_that_is_cut_has_no_reason() {
        let line = read("3b:00.0", "0x1234000");
        for end in ["fault addr", "fault addr 0x1234000"] {
            let (cut, _) = line.split_once(end).unwrap();
            let found = of_text(&format!(
                "[ 100.1] {cut}{end}\n[ 100.2] usb 1-1: new device\n"
            ));
            assert_eq!(causes(&found), ["fault.no-access"], "{end}");
            assert_eq!(found[0].certainty, Certainty::Unknown);
            assert!(
                found[0].text.contains("the line ends before its reason"),
                "{}",
                found[0].text
            );
            assert!(!found[0].text.contains("Code"), "{}", found[0].text);
        }
    }

    #[test]
    fn an_interrupt_names_its_sender() {
        for (flags, what) in [("0x0008", "no entry"), ("0x0018", "does not permit it")] {
            let text = format!(
                "[ 9.1] nvme 0000:41:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x000e address=0x1000 flags={flags}]\n"
            );
            let found = of_text(&text);
            assert_eq!(causes(&found)[0], "fault.interrupt-request");
            let lines: Vec<_> = found[0].advice.iter().map(|one| one.line()).collect();
            assert!(lines[0].contains(what), "{lines:?}");
            assert_eq!(lines[2], "lspci -vv -s 41:00.0");
        }
    }

    #[test]
    fn advice_for_a_driver_is_for_the_one_that_uses_the_device() {
        let advice = |text: &str| {
            let found = of_text(text);
            let all = found.iter().flat_map(|one| &one.advice);
            let lines: Vec<_> = all.map(|one| one.line()).collect();
            (causes(&found), lines.join("\n"))
        };
        let fault = format!("[ 100.1] {}\n", read("3b:00.0", "0x1234000"));
        let iomem = "00100000-7fffffff : System RAM\n";
        let (found, lines) = advice(&format!("{fault}{iomem}"));
        assert_eq!(found, ["fault.no-access", "fault.physical-address"]);
        let condition = "If it is not passed through (lspci -k -s 3b:00.0): ";
        assert_eq!(lines.matches(condition).count(), 3, "{lines}");
        let given = "[  90.5] vfio-pci 0000:3b:00.0: enabling device (0400 -> 0402)\n";
        for text in [
            format!("{given}{fault}{iomem}"),
            format!("{fault}{given}{iomem}"),
        ] {
            let (found, lines) = advice(&text);
            assert_eq!(found, ["fault.no-access"]);
            assert!(
                lines.contains("In the guest: CONFIG_DMA_API_DEBUG"),
                "{lines}"
            );
            assert!(lines.contains("--hmp 'info mtree -f'"), "{lines}");
            let text = &of_text(&text)[0].text;
            assert!(text.ends_with("Its driver is vfio-pci."), "{text}");
            assert!(!lines.contains("iommu.strict"), "{lines}");
        }
        let hosts = "3b:00.0 x [0200]: y [8086:1]\n\tKernel driver in use: ice\n";
        let (found, lines) = advice(&format!("{given}{fault}{iomem}{hosts}"));
        assert_eq!(found, ["fault.no-access", "fault.physical-address"]);
        assert!(!lines.contains("passed through"), "{lines}");
    }

    #[test]
    fn maps_of_memory_are_not_joined_where_machines_are_mixed() {
        let fault = "[   10.5] DMAR: [DMA Read] Request device [03:00.0] fault addr 1234567000 [fault reason 06] PTE Read access is not set\n";
        let iomem = "100000000-207fffffff : System RAM\n";
        let joined = of_text(&format!("{fault}{iomem}"));
        assert!(causes(&joined).contains(&"fault.physical-address"));
        let other = "[    1.5] AMD-Vi: Event logged [IO_PAGE_FAULT device=41:00.0 domain=0x0000 address=0x1000 flags=0x0070]\n";
        let mixed = of_text(&format!("{fault}{iomem}{other}"));
        assert!(!causes(&mixed).contains(&"fault.physical-address"));
        // An aperture of one machine, and a fault of another.
        let aperture = "0x0 0x7fffffffff\n";
        let fault = fault.replace("1234567000", "8234567000");
        let joined = of_text(&format!("{fault}{aperture}"));
        assert!(causes(&joined).contains(&"fault.address-width"));
        let mixed = of_text(&format!("{fault}{aperture}{other}"));
        assert!(!causes(&mixed).contains(&"fault.address-width"));
    }

    #[test]
    fn displays_are_those_by_class_or_place() {
        let lines = |device: &str| {
            (0..3)
                .map(|nth| format!("[  40.{}] {}\n", 100 + nth * 17, read(device, "0x9000000")))
                .collect::<String>()
        };
        assert_eq!(
            causes(&of_text(&lines("00:02.0"))),
            ["fault.no-access", "fault.scanout"]
        );
        assert_eq!(causes(&of_text(&lines("03:00.0"))), ["fault.no-access"]);
        let listed = lines("03:00.0") + "03:00.0 VGA compatible controller [0300]: x [10de:1]\n";
        assert_eq!(
            causes(&of_text(&listed)),
            ["fault.no-access", "fault.scanout"]
        );
    }

    #[test]
    fn memory_of_the_host_is_named_where_all_addresses_are() {
        let text = format!(
            "[ 100.1] {}\n00100000-7fffffff : System RAM\n",
            read("03:00.0", "0x1234000")
        );
        assert_eq!(
            causes(&of_text(&text)),
            ["fault.no-access", "fault.physical-address"]
        );
        let both = format!("[ 100.2] {}\n{text}", read("03:00.0", "0x80000000"));
        assert_eq!(causes(&of_text(&both)), ["fault.no-access"]);
    }
}
