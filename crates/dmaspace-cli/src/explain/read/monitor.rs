//! Lines of kernels and monitors beside the faults of units: limits, failed maps, groups, firmware, versions.
//!
//! Sources of the texts: Linux 5.4 to 7.2 `drivers/vfio/vfio_iommu_type1.c`, `drivers/iommu/iommu.c`
//! (`iommu_group_do_attach_device`, `__iommu_device_set_domain`), `drivers/iommu/intel/{iommu,dmar}.c`,
//! `drivers/iommu/amd/init.c`, `arch/x86/virt/svm/sev.c` (`rmpupdate`, `dump_rmpentry`); QEMU 5.0 to 11.0
//! `hw/vfio/{container,listener,iommufd}.c`, `backends/iommufd.c`, `util/oslib-posix.c`; libvirt
//! `src/util/virprocess.c` (`virProcessSetMaxMemLock`); cloud-hypervisor `vfio` crate and `pci/src/vfio.rs`;
//! Kubernetes scheduler `NodeResourcesFit`; rust-vmm `vfio-ioctls` (`VfioError`), which cloud-hypervisor and kata's
//! monitors use; KubeVirt `virt-handler` (`AdjustResources`); OCI runtime specification, "POSIX process" (`rlimits`).

use super::super::facts::Line;
use super::super::number::{hexadecimal, number, number_after, pci, pci_within};

/// The fact of a message; `None` where it is of another kind.
pub(in crate::explain) fn line(text: &str) -> Option<Line> {
    let has = |part: &str| text.contains(part);
    if has("RLIMIT_MEMLOCK (") && has("exceeded") {
        return Some(Line::MemlockExceeded {
            limit: number_after(text, "RLIMIT_MEMLOCK (")?,
            mediated: has("external") || has("pin_page_"),
        });
    }
    if has("cannot limit locked memory") {
        let (_, rest) = text.split_once("cannot limit locked memory")?;
        return Some(Line::CannotLimit {
            bytes: number_after(rest, " to ")?,
        });
    }
    if let Some(limit) = limit(text) {
        return Some(limit);
    }
    if has("running out of DMA mappings") {
        return Some(Line::ManyMappings {
            most: number_after(text, "DMA mappings: ").unwrap_or(0),
            device: device(text),
        });
    }
    // vfio-ioctls names no group.
    let inviable = has("group is inviable") || has("GroupViable");
    if has("is not viable") && has("group") || inviable {
        return Some(Line::NotViable {
            group: number_after(text, "group ").and_then(|group| u32::try_from(group).ok()),
            device: device(text),
        });
    }
    if let Some(refused) = refused(text) {
        return Some(refused);
    }
    if has("ineligible for IOMMU domain attach") || has("1:1 IOMMU mapping") {
        return Some(Line::Ineligible {
            device: device(text),
        });
    }
    if has("is not sufficient for the mapped address") {
        let bits = number_after(text, "width (")?;
        let (_, address) = text.rsplit_once('(')?;
        let address = address.split(')').next()?.trim_start_matches("0x");
        return Some(Line::Width {
            bits: u32::try_from(bits)
                .ok()
                .filter(|bits| (12..=64).contains(bits))?,
            address: hexadecimal(address),
        });
    }
    if has("can't map guest IOVA region") {
        let (_, rest) = text.split_once("IOVA region")?;
        let (first, last) = rest.trim().split_once("..")?;
        let last = last.split_whitespace().next()?;
        return Some(Line::CannotMap {
            first: number(first)?,
            last: number(last.trim_end_matches([',', '.']))?,
        });
    }
    if let Some(failed) = map_failed(text) {
        return Some(failed);
    }
    if let Some(rmp) = rmp(text) {
        return Some(rmp);
    }
    firmware(text).or_else(|| other(text))
}

/// Refusals of a device or a group before anything is mapped. QEMU `hw/vfio/{pci,container}.c`
/// (`vfio_device_groupid`, `vfio_get_group`, `vfio_init_container`); Linux `vfio_iommu_type1_attach_group`, whose EPERM is
/// that of interrupts.
fn refused(text: &str) -> Option<Line> {
    let has = |part: &str| text.contains(part);
    let device = || device(text);
    if has("no iommu_group found") {
        return Some(Line::NoGroup { device: device() });
    }
    if has("failed to open /dev/vfio/") && has("Permission denied") {
        let group = number_after(text, "/dev/vfio/")?;
        let group = u32::try_from(group).ok()?;
        let device = device();
        return Some(Line::GroupFile { group, device });
    }
    let named = has("No interrupt remapping") && has("allow_unsafe_interrupts");
    let ends = has("ailed to set iommu for container") && has("Operation not permitted");
    (named || ends).then(|| Line::UnsafeInterrupts {
        device: device(),
        named,
    })
}

/// Lines that repeat in other words what the line before them says.
pub(in crate::explain) fn is_remark(text: &str) -> bool {
    text.contains("Please ensure all devices within the iommu_group")
        || text.contains("are bound to their vfio bus driver")
}

/// Lines that tell of no failure of their own. QEMU: `vfio_listener_region_add` ends after the line of
/// `vfio_container_dma_map`; a device without a reset is used all the same (`vfio_pci_hot_reset`); a start that has failed
/// takes back what was not reached (`vfio_kvm_device_del_fd`).
/// Linux: a device is bound although its interrupts are not isolated, since an option says so (`iommufd_device_bind`).
pub(in crate::explain) fn is_context(text: &str, map_failed: bool) -> bool {
    text.contains("no available reset mechanism")
        || text.ends_with("KVM VFIO device isn't created yet")
        || text.contains("MSI interrupts are not secure")
        || map_failed && text.ends_with("vfio: DMA mapping failed, unable to continue")
}

/// `host=01:00.0`, or another PCI address of the line.
fn device(text: &str) -> Option<String> {
    let named = text.split_once("host=").and_then(|(_, rest)| {
        let end = rest.find(|c: char| !(c.is_ascii_hexdigit() || c == ':' || c == '.'));
        pci(rest.get(..end.unwrap_or(rest.len()))?)
    });
    named.or_else(|| pci_within(text))
}

/// `/proc/PID/limits`, `ulimit -l`, `prlimit`, `LimitMEMLOCK=` of systemd, a container's options and configuration,
/// KubeVirt's handler.
fn limit(text: &str) -> Option<Line> {
    let bytes = |word: &str, unit: u64| match word {
        "unlimited" | "infinity" => Some(None),
        word => Some(Some(number(word)?.checked_mul(unit)?)),
    };
    let found = if let Some(rest) = text.strip_prefix("Max locked memory") {
        bytes(rest.split_whitespace().next()?, 1)?
    } else if let Some(rest) = text.strip_prefix("max locked memory") {
        let unit = if rest.contains("kbytes") { 1024 } else { 1 };
        bytes(rest.split_whitespace().last()?, unit)?
    } else if let Some(rest) = text.strip_prefix("MEMLOCK ") {
        // RESOURCE DESCRIPTION SOFT HARD UNITS
        let words: Vec<_> = rest.split_whitespace().collect();
        bytes(words.get(words.len().checked_sub(3)?)?, 1)?
    } else if let Some(rest) = text.strip_prefix("LimitMEMLOCK=") {
        bytes(rest.trim(), 1)?
    } else if let Some((_, rest)) = text.split_once("memlock rlimits to: Cur: ") {
        Some(number(digits(rest))?)
    } else if let Some((_, rest)) = text.split_once("\"RLIMIT_MEMLOCK\"") {
        // One entry of a list: {"type": "RLIMIT_MEMLOCK", "hard": 67108864, "soft": 65536}
        let entry = rest.split('}').next()?;
        let soft = entry.split_once("\"soft\":")?.1.trim_start();
        // The largest number: without a limit.
        number(digits(soft)).map(|soft| Some(soft).filter(|soft| *soft != u64::MAX))?
    } else if let Some((_, rest)) = text
        .split_once("ulimit memlock=")
        .or_else(|| text.split_once("ulimit=memlock="))
    {
        match rest.strip_prefix("-1") {
            Some(_) => None,
            None => Some(number(digits(rest))?),
        }
    } else {
        return None;
    };
    Some(Line::MemlockLimit { bytes: found })
}

/// The decimal digits at the start.
fn digits(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_digit());
    text.get(..end.unwrap_or(text.len())).unwrap_or_default()
}

fn map_failed(text: &str) -> Option<Line> {
    let lower = text.to_ascii_lowercase();
    let maps = [
        "map_dma",
        "dma_map",
        "dmamap",
        "ioas_map",
        "map_dma_region",
        "dma mapping",
        "map dma",
        "mapping dma",
        "iommudmamap",
        "ioasmap",
        "guest memory map into iommu table",
    ];
    if !maps.iter().any(|part| lower.contains(part)) || lower.contains("unmap") {
        return None;
    }
    let errors = [
        ("invalid argument", 22),
        ("cannot allocate memory", 12),
        ("out of memory", 12),
        ("no space left on device", 28),
        ("bad address", 14),
        ("file exists", 17),
        ("operation not permitted", 1),
        ("enomem", 12),
        ("einval", 22),
        ("enospc", 28),
        ("efault", 14),
    ];
    let named = errors.iter().find(|(name, _)| lower.contains(name));
    let code = || {
        let keys = [
            "os error ",
            "error(",
            "= -",
            "failed: -",
            "dma: -",
            "ret: -",
            "map: -",
        ];
        let found = keys.iter().find_map(|key| number_after(&lower, key));
        found.and_then(|code| i32::try_from(code).ok())
    };
    let errno = named.map(|(_, errno)| *errno).or_else(code)?;
    // vfio_dma_map(container, iova, size, vaddr), also within the message of another program.
    let arguments = text
        .split_once("dma_map(")
        .map(|(_, rest)| rest.split(')').next().unwrap_or(rest));
    let mut numbers = arguments
        .into_iter()
        .flat_map(|list| list.split(','))
        .skip(1)
        .map(|word| number(word.trim()));
    let (first, second) = (numbers.next().flatten(), numbers.next().flatten());
    let key = |keys: &[&str]| keys.iter().find_map(|key| number_after(&lower, key));
    Some(Line::MapFailed {
        iova: first.or_else(|| key(&["iova=", "iova: ", "iova "])),
        length: second.or_else(|| key(&["size=", "size: ", "length=", "len="])),
        errno,
        iommufd: lower.contains("ioas") || lower.contains("iommufd"),
        device: device(text),
    })
}

fn rmp(text: &str) -> Option<Line> {
    let lower = text.to_ascii_lowercase();
    if lower.contains("rmpupdate failed") {
        let pfn = |key: &str| {
            let rest = lower.split_once(key)?.1;
            let rest = rest.trim_start_matches([' ', ':']).trim_start_matches("0x");
            hexadecimal(rest.split(|c: char| !c.is_ascii_hexdigit()).next()?)
        };
        let level = ["pg_level: ", "level: "]
            .iter()
            .find_map(|key| number_after(&lower, key));
        return Some(Line::RmpUpdate {
            pfn: pfn("pfn")?,
            level: level
                .and_then(|level| u32::try_from(level).ok())
                .unwrap_or(0),
            code: u32::try_from(number_after(&lower, "ret: ")?).ok()?,
        });
    }
    // SEV-SNP: PFN: 0x56601, [0x8000000000000005 - 0x0000000000000000]
    let rest = text.split_once("PFN: 0x")?.1;
    let (pfn, rest) = rest.split_once(", [0x")?;
    Some(Line::RmpEntry {
        pfn: hexadecimal(pfn)?,
        low: hexadecimal(rest.split(' ').next()?)?,
    })
}

fn firmware(text: &str) -> Option<Line> {
    let has = |part: &str| text.contains(part);
    if has("returns all ones") {
        let address = text
            .split_once("address ")
            .and_then(|(_, rest)| hexadecimal(rest.trim_start_matches("0x").split(' ').next()?));
        return Some(Line::UnitAbsent { address });
    }
    // DMAR: dmar0: reg_base_addr fed80000 ver 0:0 cap 0 ecap 0
    if let Some((_, rest)) = text
        .split_once("reg_base_addr ")
        .filter(|_| text.ends_with("cap 0 ecap 0"))
    {
        let address = hexadecimal(rest.split(' ').next()?);
        return Some(Line::UnitAbsent { address });
    }
    if has("RMRR [") {
        let inside = text.split_once("RMRR [")?.1.split(']').next()?;
        let (first, last) = inside.trim_start_matches("mem ").split_once('-')?;
        return Some(Line::BadRegion {
            first: number(first.trim())?,
            last: number(last.trim())?,
        });
    }
    if has("IVRS invalid checksum") || has("IVRS") && has("checksum") {
        return Some(Line::BadTable { table: "IVRS" });
    }
    if has("DMAR")
        && (has("checksum")
            || has("reported at address zero")
            || has("Invalid DMAR")
            || has("zero-length"))
        || has("Incorrect checksum in table [DMAR]")
    {
        return Some(Line::BadTable { table: "DMAR" });
    }
    if has("AMD-Vi") && has("IOAPIC") && (has("not in IVRS") || has("No southbridge IOAPIC")) {
        let what = text.split_once("IOAPIC").map_or("", |(_, rest)| rest);
        let what: String = what
            .chars()
            .take_while(|c| c.is_ascii_digit() || matches!(c, '[' | ']'))
            .collect();
        return Some(Line::IoapicMissing {
            what: format!("IOAPIC{what}"),
        });
    }
    None
}

fn other(text: &str) -> Option<Line> {
    let has = |part: &str| text.contains(part);
    if has("boot mappings") && has("preserved") {
        return Some(Line::BootMappings {
            count: number_after(text, "preserved ")?,
        });
    }
    if has("soft iova-to-phys=") {
        return Some(Line::SoftWalk {
            physical: number_after(text, "iova-to-phys=")?,
        });
    }
    if has("for guest RAM")
        && (has("Cannot allocate memory") || has("Insufficient") || has("unable to map"))
        || has("Insufficient free host memory pages")
        || has("preallocating memory failed")
        || has("Insufficient hugepages-")
    {
        let page = text
            .split_once("Insufficient hugepages-")
            .and_then(|(_, rest)| size(rest.split(|c: char| !c.is_ascii_alphanumeric()).next()?));
        return Some(Line::PoolEmpty { page });
    }
    version(text)
}

/// `2Mi`, `1Gi` of Kubernetes.
fn size(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let unit = match text.get(digits..)? {
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1u64 << 30,
        _ => return None,
    };
    text.get(..digits)?.parse::<u64>().ok()?.checked_mul(unit)
}

fn version(text: &str) -> Option<Line> {
    let after = |key: &str| {
        let rest = text.split_once(key)?.1.trim_start();
        let mut parts = rest.split(|c: char| !c.is_ascii_digit());
        Some((
            parts.next()?.parse::<u32>().ok()?,
            parts.next()?.parse::<u32>().ok()?,
        ))
    };
    for key in [
        "QEMU emulator version ",
        "qemu version: ",
        "QEMU version ",
        "qemu-kvm version ",
    ] {
        if let Some((major, minor)) = after(key) {
            return Some(Line::Qemu { major, minor });
        }
    }
    if let Some((major, minor)) = text
        .starts_with("Linux version ")
        .then(|| after("Linux version "))
        .flatten()
    {
        return Some(Line::Linux { major, minor });
    }
    // `uname -a`: Linux HOST VERSION ...
    let mut words = text.strip_prefix("Linux ")?.split(' ');
    let (_, release) = (words.next()?, words.next()?);
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    let (major, minor) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let dots = release.bytes().filter(|byte| *byte == b'.').count();
    (dots >= 1 && release.starts_with(|c: char| c.is_ascii_digit()))
        .then_some(Line::Linux { major, minor })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_decoded_with_their_numbers() {
        assert_eq!(
            line("vfio_pin_pages_remote: RLIMIT_MEMLOCK (65536) exceeded"),
            Some(Line::MemlockExceeded {
                limit: 65536,
                mediated: false
            })
        );
        assert_eq!(
            line("vfio_pin_page_external: Task qemu (12) RLIMIT_MEMLOCK (1048576) exceeded"),
            Some(Line::MemlockExceeded {
                limit: 1 << 20,
                mediated: true
            })
        );
        assert_eq!(
            line(
                "error: internal error: cannot limit locked memory of process 7 to 9663676416: Operation not permitted"
            ),
            Some(Line::CannotLimit { bytes: 9 << 30 })
        );
        assert_eq!(
            line("Max locked memory         8388608              8388608              bytes"),
            Some(Line::MemlockLimit {
                bytes: Some(8 << 20)
            })
        );
        assert_eq!(
            line("max locked memory           (kbytes, -l) 64"),
            Some(Line::MemlockLimit {
                bytes: Some(64 << 10)
            })
        );
    }

    #[test]
    fn context_is_no_failure() {
        let after = "qemu: hardware error: vfio: DMA mapping failed, unable to continue";
        assert!(is_context(after, true) && !is_context(after, false));
        let reset = "vfio: Cannot reset device 0000:00:05.0, no available reset mechanism.";
        assert!(is_context(reset, false));
        assert!(!is_context("vfio: Cannot reset device 0000:00:05.0", true));
    }

    #[test]
    fn failed_maps_have_errors_and_addresses() {
        for (text, iova, errno) in [
            (
                "qemu-system-x86_64: VFIO_MAP_DMA failed: Invalid argument",
                None,
                22,
            ),
            ("qemu: VFIO_MAP_DMA: -12", None, 12),
            (
                "vfio_dma_map(0x5581, 0x100000000, 0x40000000, 0x7f00) = -12 (Cannot allocate memory)",
                Some(0x1_0000_0000),
                12,
            ),
            (
                "vfio_container_dma_map(0x1, 0x380000000000, 0x1000, 0x2) = -22 (Invalid argument)",
                Some(0x3800_0000_0000),
                22,
            ),
            (
                "VmBoot(DeviceManager(VfioDmaMap(IommuDmaMap(Error(28)))))",
                None,
                28,
            ),
            ("IOMMU_IOAS_MAP failed: Bad address, PCI BAR?", None, 14),
        ] {
            let Some(Line::MapFailed {
                iova: found,
                errno: code,
                ..
            }) = line(text)
            else {
                panic!("{text}")
            };
            assert_eq!((found, code), (iova, errno), "{text}");
        }
        assert_eq!(
            line("vfio_dma_unmap(0x1, 0x2, 0x3) = -22 (Invalid argument)"),
            None
        );
    }

    #[test]
    fn lines_of_containers_carry_limits_maps_and_groups() {
        for (text, bytes) in [
            (
                "set process {pid:12 binary:virtqemud} memlock rlimits to: Cur: 18572378928 Max:18572378928",
                Some(18_572_378_928),
            ),
            (
                "\"rlimits\": [{\"type\": \"RLIMIT_MEMLOCK\", \"hard\": 67108864, \"soft\": 65536}],",
                Some(65536),
            ),
            (
                "{\"type\":\"RLIMIT_MEMLOCK\",\"hard\":18446744073709551615,\"soft\":18446744073709551615}",
                None,
            ),
            ("docker run --ulimit memlock=65536:65536 x", Some(65536)),
            ("podman run --ulimit=memlock=-1 x", None),
        ] {
            assert_eq!(line(text), Some(Line::MemlockLimit { bytes }), "{text}");
        }
        for text in [
            "group is inviable",
            "VmBoot(DeviceManager(VfioCreate(GroupViable)))",
        ] {
            let right = Line::NotViable {
                group: None,
                device: None,
            };
            assert_eq!(line(text), Some(right), "{text}");
        }
        let failed = |text| match line(text) {
            Some(Line::MapFailed {
                iova,
                length,
                errno,
                device,
                ..
            }) => (iova, length, errno, device),
            other => panic!("{text}: {other:?}"),
        };
        let text = "failed to create shim task: (qemu) vfio 0000:17:00.0: vfio_dma_map(0x3e, 0x40000000, 0x500000000, 0xff) = -14 (Bad address): unknown";
        let device = Some("0000:17:00.0".to_owned());
        let right = (Some(0x4000_0000), Some(0x5_0000_0000), 14, device);
        assert_eq!(failed(text), right);
        let text =
            "failed to add guest memory map into iommu table: Cannot allocate memory (os error 12)";
        assert_eq!(failed(text), (None, None, 12, None));
    }

    #[test]
    fn versions_are_those_of_kernel_and_monitor() {
        assert_eq!(
            line("Linux version 6.8.0-45-generic (x)"),
            Some(Line::Linux { major: 6, minor: 8 })
        );
        assert_eq!(
            line("Linux box 6.12.3 #1 SMP x86_64 GNU/Linux"),
            Some(Line::Linux {
                major: 6,
                minor: 12
            })
        );
        assert_eq!(
            line("QEMU emulator version 6.2.0 (Debian)"),
            Some(Line::Qemu { major: 6, minor: 2 })
        );
        assert_eq!(line("Linux is a system"), None);
    }

    #[test]
    fn widths_regions_and_units_of_firmware_are_decoded() {
        assert_eq!(
            line(
                "intel_iommu_map: iommu width (39) is not sufficient for the mapped address (8800001000)"
            ),
            Some(Line::Width {
                bits: 39,
                address: Some(0x88_0000_1000)
            })
        );
        assert_eq!(
            line(
                "DMAR: [Firmware Bug]: Your BIOS is broken; DMAR reported at address fed91000 returns all ones!"
            ),
            Some(Line::UnitAbsent {
                address: Some(0xfed9_1000)
            })
        );
        assert_eq!(
            line("DMAR: dmar0: reg_base_addr fed80000 ver 0:0 cap 0 ecap 0"),
            Some(Line::UnitAbsent {
                address: Some(0xfed8_0000)
            })
        );
        assert_eq!(
            line(
                "DMAR: [Firmware Bug]: Your BIOS is broken; bad RMRR [0x000000007b000000-0x000000007a7fffff]"
            ),
            Some(Line::BadRegion {
                first: 0x7b00_0000,
                last: 0x7a7f_ffff
            })
        );
        assert_eq!(
            line("SEV-SNP: RMPUPDATE failed for PFN 1a2b3, pg_level: 1, ret: 4"),
            Some(Line::RmpUpdate {
                pfn: 0x1_a2b3,
                level: 1,
                code: 4
            })
        );
    }
}
