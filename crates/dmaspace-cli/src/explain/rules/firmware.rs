//! Firmware's tables and reserved regions.

mod one_to_one;

use dmaspace::firmware::{FirmwareRegion, FirmwareRegionKind, FirmwareTable};

use super::super::facts::{Facts, Known, Line, TableFact};
use super::super::finding::{Advice, Certainty, Evidence, Finding};
use super::super::number::pci;

const IOAPIC_MISSING: &str = "firmware.ioapic-missing";
const BAD_REGION: &str = "firmware.bad-region";
/// Scopes that Linux matches in an RMRR are endpoints and bridges. Source: Linux 7.2 `drivers/iommu/intel/dmar.c`,
/// `dmar_alloc_dev_scope`, `dmar_insert_dev_scope`; `dmar_acpi_insert_dev_scope` looks at DRHDs only.
const MATCHED: [u8; 2] = [1, 2];
/// A device of the ACPI namespace.
const NAMESPACE: u8 = 5;
/// Flag of an IVMD: an exclusion range is not translated, and no identity mapping.
const EXCLUSION: u8 = 1 << 3;
const PAGE: u64 = 0x1000;
/// Devices of one range that are named.
const MOST_DEVICES: usize = 16;
/// Unit of the ranges of an RMR.
const RMR_UNIT: u64 = 0x1_0000;
const RMRR_SOURCE: &str =
    "VT-d 5.0, section 8.4 \"RMRR\"; Linux drivers/iommu/intel/iommu.c, rmrr_sanity_check";
const RMR_SOURCE: &str = "Arm DEN0049, \"Reserved Memory Range node\"; Linux drivers/acpi/arm64/iort.c, iort_get_rmrs, iort_rmr_desc_check_overlap";

pub(super) fn findings(facts: &Facts, found: &mut Vec<Finding>) {
    one_to_one::findings(facts, found);
    for known in &facts.tables {
        regions(known, found);
        damage(known, found);
    }
    lines(facts, found);
    join_regions(found);
}

/// Makes one finding of several that call a region bad: firmware's table has it, and Linux prints two lines.
fn join_regions(found: &mut Vec<Finding>) {
    let (bad, mut kept): (Vec<_>, Vec<_>) = std::mem::take(found)
        .into_iter()
        .partition(|one| one.cause == BAD_REGION);
    let mut joined: Vec<Finding> = Vec::new();
    for one in bad {
        let known = joined
            .iter_mut()
            .find(|known| known.addresses == one.addresses);
        match known {
            Some(known) if known.certainty >= one.certainty => {
                *known = known.clone().evidence(&one.evidence);
            }
            Some(known) => *known = one.evidence(&known.evidence),
            None => joined.push(one),
        }
    }
    kept.append(&mut joined);
    *found = kept;
}

/// The devices that a region is for, where the table names them whole.
fn devices(table: &FirmwareTable, region: &FirmwareRegion) -> Vec<String> {
    match &region.kind {
        FirmwareRegionKind::Rmr { ids, .. } => ids
            .iter()
            .filter(|(_, first, last)| first == last)
            .take(MOST_DEVICES)
            .map(|(unit, id, _)| {
                let mut mappings = table.id_mappings.iter().filter(|one| one.unit == *unit);
                let device = mappings.find_map(|mapping| mapping.device(*id));
                let device = device.filter(|device| pci(device).is_some());
                device.unwrap_or_else(|| format!("{id:#x}"))
            })
            .collect(),
        FirmwareRegionKind::Rmrr(scopes) => scopes
            .iter()
            .filter_map(|scope| scope.address(region.segment))
            .collect(),
        FirmwareRegionKind::Ivmd { devices, .. } => match devices {
            Some((first, last)) if first == last => vec![address(region.segment, *first)],
            _ => Vec::new(),
        },
    }
}

fn address(segment: u16, id: u16) -> String {
    format!(
        "{segment:04x}:{:02x}:{:02x}.{}",
        id >> 8,
        id >> 3 & 0x1f,
        id & 7
    )
}

/// The kernel ignores the region: nothing of it becomes an identity mapping.
fn is_dropped(region: &FirmwareRegion) -> bool {
    let kind = match &region.kind {
        FirmwareRegionKind::Rmrr(scopes) => {
            !scopes.iter().any(|scope| MATCHED.contains(&scope.kind))
        }
        FirmwareRegionKind::Ivmd { flags, .. } => flags & EXCLUSION != 0,
        // A region of type direct-relaxable, with which the device may be given away.
        FirmwareRegionKind::Rmr { remapped, .. } => *remapped,
    };
    kind || region.last < region.first
}

fn regions(known: &Known<TableFact>, found: &mut Vec<Finding>) {
    for region in &known.fact.table.regions {
        let evidence = known.place(region.offset);
        if let FirmwareRegionKind::Rmrr(scopes) = &region.kind {
            for scope in scopes.iter().filter(|scope| !MATCHED.contains(&scope.kind)) {
                let certainty = match scope.kind {
                    NAMESPACE => Certainty::Certain,
                    _ => Certainty::Likely,
                };
                let device = scope.address(region.segment);
                let named = device.clone().unwrap_or_else(|| "the device".into());
                let finding = Finding::new("firmware.scope-unmatched", certainty, "VT-d 5.0, sections 8.3.1 and 8.4; Linux drivers/iommu/intel/dmar.c, dmar_acpi_insert_dev_scope, dmar_insert_dev_scope")
                    .devices(device)
                    .range(region.first, region.last)
                    .evidence([&evidence])
                    .say(format!(
                        "The reserved region {:#x} to {:#x} names {named} by a scope of type {} (number {}), which Linux \
                         does not match in reserved regions: the region is dropped, and DMA in it will fault.",
                        region.first, region.last, scope.kind, scope.number
                    ))
                    .advise(Advice::text(
                        "A firmware update that names the device by a scope of type 1; its path is that of a PCI function.",
                    ));
                found.push(finding);
            }
        }
        let range = (region.first, region.last);
        found.extend(match region.kind {
            FirmwareRegionKind::Rmr { .. } => bad_region(range, RMR_UNIT, RMR_SOURCE, &evidence),
            _ => bad_region(range, PAGE, RMRR_SOURCE, &evidence),
        });
    }
}

/// Order, length and alignment of a region, whose first address and length are multiples of `unit`.
fn bad_region(
    (first, last): (u64, u64),
    unit: u64,
    source: &'static str,
    evidence: &Evidence,
) -> Option<Finding> {
    let certain = last < first;
    let loose = first % unit != 0 || last.wrapping_add(1) % unit != 0;
    if !certain && !loose {
        return None;
    }
    let (certainty, why) = match certain {
        true => (
            Certainty::Certain,
            "ends before it starts, or has no length",
        ),
        false => (Certainty::Likely, "does not begin and end with a page"),
    };
    let finding = Finding::new(BAD_REGION, certainty, source)
        .range(first, last)
        .evidence([evidence])
        .say(format!(
            "The reserved region {first:#x} to {last:#x} {why}."
        ))
        .advise(Advice::text(
            "A firmware update: the kernel drops the region or rounds it.",
        ));
    Some(finding)
}

fn damage(known: &Known<TableFact>, found: &mut Vec<Finding>) {
    for damage in &known.fact.table.damage {
        let finding = Finding::certain("firmware.bad-table", "ACPI 6.5, section 5.2.6; VT-d 5.0, section 8.1; AMD 48882 3.08, section 5.2.2; Arm DEN0049; RISC-V IO Mapping Table 1.0")
            .evidence([&known.evidence])
            .say(format!("The table {} is damaged: {damage}.", known.fact.table.signature))
            .advise(Advice::text(
                "Take the table again from /sys/firmware/acpi/tables; if it is the same there, a firmware update.",
            ));
        found.push(finding);
    }
}

fn lines(facts: &Facts, found: &mut Vec<Finding>) {
    let before = found.len();
    for one in &facts.lines {
        match &one.fact {
            Line::UnitAbsent { address } => {
                let mut finding = Finding::certain("firmware.bad-table", "Linux drivers/iommu/intel/dmar.c, dmar_validate_one_drhd, alloc_iommu")
                    .evidence([&one.evidence])
                    .say(
                        "The table names a unit whose registers read as all ones, or zero: nothing answers there. The unit is \
                         switched off, or the address is wrong.",
                    )
                    .advise(Advice::text("Switch VT-d on in the firmware's setup, or update the firmware."));
                if let Some(address) = address {
                    finding = finding.range(*address, *address);
                }
                found.push(finding);
            }
            Line::BadTable { table } => found.push(
                Finding::certain("firmware.bad-table", "Linux drivers/iommu/amd/init.c, check_ivrs_checksum; drivers/iommu/intel/dmar.c, parse_dmar_table")
                    .evidence([&one.evidence])
                    .say(format!("The kernel calls firmware's table {table} damaged."))
                    .advise(Advice::text("A firmware update.")),
            ),
            Line::BadRegion { first, last } => {
                let finding = bad_region((*first, *last), PAGE, RMRR_SOURCE, &one.evidence).unwrap_or_else(|| {
                    Finding::likely(BAD_REGION, "Linux arch/x86/include/asm/iommu.h, arch_rmrr_sanity_check")
                        .range(*first, *last)
                        .evidence([&one.evidence])
                        .say(format!(
                            "The reserved region {first:#x} to {last:#x} does not lie in memory that firmware's own map \
                             calls reserved."
                        ))
                        .advise(Advice::text("A firmware update."))
                });
                found.push(finding);
            }
            Line::IoapicMissing { what } => {
                let known = (found.iter_mut().skip(before)).find(|known| known.cause == IOAPIC_MISSING);
                // The line of the southbridge, which names none, follows the others.
                if let Some(known) = known.filter(|_| what == "IOAPIC") {
                    *known = known.clone().evidence([&one.evidence]);
                    continue;
                }
                found.push(
                Finding::certain(IOAPIC_MISSING, "Linux drivers/iommu/amd/init.c, check_ioapic_information")
                    .evidence([&one.evidence])
                    .say(format!("{what} has no entry in firmware's table IVRS, so interrupt remapping is switched off."))
                    .advise(Advice::text(
                        "A firmware update; until then ivrs_ioapic[ID]=BUS:DEVICE.FUNCTION on the kernel's command line, \
                         with the numbers of this machine.",
                    )),);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::facts::Facts;
    use super::super::super::finding::Certainty;
    use super::super::super::read::acpi;
    use super::super::{causes, findings, of_text};

    /// An IORT: an SMMUv3 at 48, a root complex of segment 0 whose functions have their numbers plus 0x10000, and a
    /// reserved memory range for stream id 0x10100.
    fn iort(flags: u32, length: u64) -> Vec<u8> {
        let words = |words: &[u32]| {
            words
                .iter()
                .flat_map(|word| word.to_le_bytes())
                .collect::<Vec<u8>>()
        };
        let mut nodes = words(&[0x2004, 0, 0, 32, 0x2b40_0000, 0, 0, 0]);
        nodes.extend(words(&[0x3802, 0, 1, 36, 0, 0, 0, 0, 0]));
        nodes.extend(words(&[0, 0xffff, 0x1_0000, 48, 0]));
        nodes.extend(words(&[0x4406, 0, 1, 48, flags, 1, 28, 0x8000_0000, 0]));
        nodes.extend(length.to_le_bytes());
        nodes.extend(words(&[0, 0, 0, 0x1_0100, 48, 1]));
        let mut table = b"IORT".to_vec();
        table.extend(words(&[48 + nodes.len() as u32]));
        table.extend([0; 28]);
        table.extend(words(&[3, 48, 0]));
        table.extend(nodes);
        let sum = table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        table[9] = 0u8.wrapping_sub(sum);
        table
    }

    fn of_iort(table: &[u8], log: &str) -> Vec<super::Finding> {
        let mut facts = Facts::default();
        super::super::super::read::Text::new(&mut facts, 0)
            .read(log.as_bytes(), &mut |_| {})
            .unwrap();
        acpi::take(&mut facts, 1, None, table);
        facts.translate();
        findings(&mut facts)
    }

    #[test]
    fn a_reserved_memory_range_is_likely_one_to_one() {
        let found = of_iort(&iort(0, 0x1_0000), "");
        assert_eq!(causes(&found), ["firmware.one-to-one"]);
        assert_eq!(found[0].certainty, Certainty::Likely);
        assert_eq!(found[0].devices, ["0000:01:00.0"]);
        assert_eq!(found[0].addresses, [(0x8000_0000, 0x8000_ffff)]);
        // The system may map it elsewhere.
        assert!(of_iort(&iort(1, 0x1_0000), "").is_empty());
    }

    #[test]
    fn a_reserved_memory_range_has_units_of_64_kib() {
        for (length, certainty) in [(0x1000, Certainty::Likely), (0, Certainty::Certain)] {
            let found = of_iort(&iort(1, length), "");
            assert_eq!(causes(&found), ["firmware.bad-region"]);
            assert_eq!(found[0].certainty, certainty);
        }
    }

    #[test]
    fn a_stream_id_is_a_function_by_the_iort() {
        let log = "[    5.1] arm-smmu-v3 arm-smmu-v3.0.auto: event 0x10 received:\n\
            [    5.1] arm-smmu-v3 arm-smmu-v3.0.auto: \t0x0001030800000010\n\
            [    5.1] arm-smmu-v3 arm-smmu-v3.0.auto: \t0x0000020800000000\n\
            [    5.1] arm-smmu-v3 arm-smmu-v3.0.auto: \t0x00000000fff00000\n\
            [    5.1] arm-smmu-v3 arm-smmu-v3.0.auto: \t0x00000000fff00000\n";
        let found = of_iort(&iort(1, 0x1_0000), log);
        assert_eq!(found[0].cause, "fault.not-mapped");
        assert_eq!(found[0].devices, ["0000:03:01.0"]);
        assert!(found[0].text.contains("0x10308"), "{}", found[0].text);
        let places = found[0].evidence.iter().filter(|one| one.place.file == 1);
        assert_eq!(places.count(), 1);
        // A number that the table does not have stays one.
        let other = of_iort(&iort(1, 0x1_0000), &log.replace("0x00010308", "0x00030308"));
        assert_eq!(other[0].devices, ["0x30308"]);
        // Two tables that disagree.
        let mut second = iort(1, 0x1_0000);
        second[108] = 1;
        second[9] = second[9].wrapping_sub(1);
        let mut facts = Facts::default();
        super::super::super::read::Text::new(&mut facts, 0)
            .read(log.as_bytes(), &mut |_| {})
            .unwrap();
        acpi::take(&mut facts, 1, None, &iort(1, 0x1_0000));
        acpi::take(&mut facts, 2, None, &second);
        facts.translate();
        let found = findings(&mut facts);
        assert_eq!(found[0].devices, ["0x10308"]);
        assert!(
            found[0].text.contains("several devices"),
            "{}",
            found[0].text
        );
    }

    #[test]
    fn lines_of_both_kernels_keep_the_device_from_guests() {
        for line in [
            "vfio-pci 0000:05:00.0: Device is ineligible for IOMMU domain attach due to platform RMRR requirement.  Contact your platform vendor.",
            "vfio-pci 0000:05:00.0: Firmware has requested this device have a 1:1 IOMMU mapping, rejecting configuring the device without a 1:1 mapping. Contact your platform vendor.",
        ] {
            let found = of_text(&format!(
                "[  1.0] {line}\n0x0000000079000000 0x0000000079000fff direct\n"
            ));
            assert_eq!(causes(&found), ["firmware.one-to-one"]);
            assert_eq!(found[0].devices, ["0000:05:00.0"]);
            assert_eq!(found[0].addresses, [(0x7900_0000, 0x7900_0fff)]);
        }
    }

    #[test]
    fn relaxable_regions_keep_nothing() {
        assert_eq!(
            causes(&of_text(
                "0x0000000079000000 0x0000000079000fff direct-relaxable\n"
            )),
            [""; 0]
        );
        let direct = of_text("0x0000000079000000 0x0000000079000fff direct\n");
        assert_eq!(direct[0].certainty, Certainty::Certain);
    }

    #[test]
    fn regions_of_lines_are_judged_by_arithmetic() {
        let bad = |range: &str| {
            of_text(&format!(
                "[  0.1] DMAR: [Firmware Bug]: Your BIOS is broken; bad RMRR [{range}]\n"
            ))
        };
        let order = bad("0x000000007b000000-0x000000007a7fffff");
        assert_eq!(
            (order[0].cause, order[0].certainty),
            ("firmware.bad-region", Certainty::Certain)
        );
        let loose = bad("0x000000007b000000-0x000000007b0007ff");
        assert_eq!(loose[0].certainty, Certainty::Likely);
        let both = bad(
            "0x000000007b000000-0x000000007b000fff]\n[  0.1] DMAR: [Firmware Bug]: No firmware reserved region can \
             cover this RMRR [0x000000007b000000-0x000000007b000fff",
        );
        assert_eq!(causes(&both), ["firmware.bad-region"]);
        assert_eq!(both[0].evidence.len(), 2);
    }
}
