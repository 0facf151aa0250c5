//! Dumps of I/O page tables against faults, by the walkers of `iopt`.

use std::error::Error as _;

use iommu::log::{Absent, Class, Dump, DumpTable, Family};
use iopt::walk::{Access, WalkReason};

use super::super::facts::{DumpText, Facts};
use super::super::finding::{Advice, At, Direction, Evidence, Finding, Place};
use super::super::folds::Fold;
use super::fault;
use crate::tables::TableFile;

const SOURCE: &str = "VT-d 5.0, sections 3.6, 3.7 and 9.7 to 9.9; Linux drivers/iommu/intel/debugfs.c, domain_translation_struct_show";
/// Addresses of a fold that are walked.
const MOST_WALKS: usize = 64;

/// The end of a walk, as far as reasons depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Walk {
    /// It goes through.
    Passes,
    /// An entry is not present.
    Absent,
    /// The leaf does not permit the access; true: it permits the other direction.
    Denied(bool),
}

pub(super) fn findings(facts: &Facts, found: &mut Vec<Finding>) {
    for dump in &facts.dumps {
        text(facts, dump, found);
    }
    contexts(facts, found);
    for (dump, places) in &facts.log_dumps {
        logged(facts, dump, places, found);
    }
}

fn text(facts: &Facts, dump: &DumpText, found: &mut Vec<Finding>) {
    if let Some(cut) = &dump.cut {
        found.push(
            Finding::certain("table.truncated", SOURCE)
                .device(dump.device.clone())
                .evidence([&dump.heading, cut])
                .say(format!(
                    "The dump of {}'s tables is cut or lacks columns: conclusions hold for its {} whole rows \
                     only.",
                    dump.device,
                    dump.rows.len()
                ))
                .advise(Advice::text("Give the whole file, as the kernel prints it.")),
        );
    }
    let file = TableFile::of_kernel_text("dump", dump.text.as_bytes());
    let tables = match &file {
        Ok(file) if !dump.rows.is_empty() => file.tables(),
        Err(error) if !dump.rows.is_empty() => {
            found.push(
                Finding::certain("table.truncated", SOURCE)
                    .device(dump.device.clone())
                    .evidence([&dump.heading])
                    .say(format!(
                        "The dump of {}'s tables is damaged: {}.",
                        dump.device,
                        crate::output::sentence(error.source().unwrap_or(error))
                    )),
            );
            return;
        }
        _ => return,
    };
    let Ok(tables) = tables else {
        return;
    };
    for fold in facts
        .folds
        .folds
        .iter()
        .filter(|fold| fold.device == dump.device)
    {
        let Some(access) = access(fold.key.direction) else {
            continue;
        };
        for address in fold.addresses.iter().take(MOST_WALKS) {
            let walk = |access| tables.walker().walk(&tables, *address, access, &mut ());
            let other = match access {
                Access::Write => Access::Read,
                _ => Access::Write,
            };
            let end = match walk(access) {
                Ok(_) => Walk::Passes,
                Err(fault) => match fault.reason {
                    WalkReason::NotPresent => Walk::Absent,
                    WalkReason::Denied { .. } => Walk::Denied(walk(other).is_ok()),
                    _ => continue,
                },
            };
            let row = dump
                .rows
                .iter()
                .find(|(pfn, _)| *pfn == address >> 12)
                .map(|(_, line)| Evidence {
                    place: Place {
                        file: dump.heading.place.file,
                        at: At::Line(*line),
                    },
                    quote: String::new(),
                });
            // Rows that are not there prove nothing in a dump that is cut.
            if end == Walk::Absent && dump.cut.is_some() {
                continue;
            }
            let place = row.as_ref().unwrap_or(&dump.heading);
            judge(fold, *address, end, &[place], found);
        }
    }
}

const fn access(direction: Direction) -> Option<Access> {
    match direction {
        Direction::Read | Direction::Execute => Some(Access::Read),
        Direction::Write => Some(Access::Write),
        Direction::Unknown => None,
    }
}

/// Context entries that debugfs shows, against faults that miss one.
fn contexts(facts: &Facts, found: &mut Vec<Finding>) {
    for fold in &facts.folds.folds {
        let missing = fold
            .meanings
            .iter()
            .all(|(code, ..)| matches!(code, Some(1 | 2)));
        if fold.key.class != Class::DeviceEntry || !missing || fold.key.family != Family::Vtd {
            continue;
        }
        // A row is of an entry that is present: bit 0 of its low word (VT-d 5.0, section 9.3).
        let row = facts
            .contexts
            .iter()
            .find(|one| one.fact.0 == fold.device && one.fact.1 & 1 != 0);
        if let Some(row) = row {
            found.push(
                Finding::certain("table.contradicts-fault", SOURCE)
                    .device(fold.device.clone())
                    .evidence(&fold.evidence)
                    .evidence([&row.evidence])
                    .say(format!(
                        "debugfs shows a context entry of {} that is present, and the reported reason says that it is \
                         not: it was written between fault and dump.",
                        fold.device
                    )),
            );
        }
    }
}

/// A walk against the class of a fault.
fn judge(fold: &Fold, address: u64, end: Walk, places: &[&Evidence], found: &mut Vec<Finding>) {
    let agrees = match (fold.key.class, end) {
        (Class::NotMapped, Walk::Absent)
        | (Class::NoAccess, Walk::Absent | Walk::Denied(_))
        | (Class::Permission, Walk::Denied(_)) => true,
        (Class::NotMapped, _) | (Class::NoAccess, Walk::Passes) | (Class::Permission, _) => false,
        _ => return,
    };
    let shown = match end {
        Walk::Passes => "an entry that permits the access",
        Walk::Absent => "no entry",
        Walk::Denied(true) => "a leaf that permits the other direction only",
        Walk::Denied(false) => "a leaf that does not permit the access",
    };
    let name = match fold.key.direction {
        Direction::Write => "write",
        _ => "read",
    };
    let device = &fold.device;
    let (cause, text) = match agrees {
        true => (
            "table.explains-fault",
            format!(
                "For {address:#x} the dump has {shown}: that is why the {name} of {device} was refused."
            ),
        ),
        false => (
            "table.contradicts-fault",
            format!(
                "For {address:#x} the dump has {shown}, which excludes the reported reason: dump and fault cannot belong to \
                 the same walk. The tables were changed between, the unit used a stale entry, or the dump is of another \
                 domain."
            ),
        ),
    };
    let known = found.iter_mut().find(|one| {
        one.cause == cause
            && one.devices == [device.clone()]
            && one.access == fold.key.direction
            && one.text.contains(shown)
    });
    match known {
        Some(one) => {
            let more = std::mem::replace(one, Finding::certain(cause, SOURCE));
            *one = more
                .range(address, address)
                .evidence(places.iter().copied());
        }
        None => {
            let mut finding = Finding::certain(cause, SOURCE)
                .devices(Some(device.clone()).filter(|device| !device.is_empty()))
                .range(address, address)
                .evidence(&fold.evidence)
                .evidence(places.iter().copied())
                .say(text);
            finding.access = fold.key.direction;
            if !agrees {
                finding = finding.advise(Advice::text(
                    "Dump the tables again while the device faults, and compare.",
                ));
            }
            found.push(finding);
        }
    }
    if agrees && end == Walk::Denied(true) {
        let mut finding = Finding::certain("fault.wrong-direction", SOURCE)
            .devices(Some(device.clone()).filter(|device| !device.is_empty()))
            .range(address, address)
            .evidence(&fold.evidence)
            .evidence(places.iter().copied())
            .say(format!("The leaf for {address:#x} permits the other direction only: the buffer was mapped for it."))
            .advise(Advice::text("In the driver: map the buffer with DMA_BIDIRECTIONAL, or for the direction in which the device uses it."));
        finding.access = fold.key.direction;
        // The likely one of before is decided now.
        found.retain(|one| {
            !(one.cause == "fault.wrong-direction"
                && one.devices == finding.devices
                && one.access == finding.access)
        });
        found.push(finding);
    }
}

/// Entries that the kernel has printed after a fault. Source: Linux 7.2 `drivers/iommu/intel/iommu.c`,
/// `dmar_fault_dump_ptes`, `pgtable_walk`.
fn logged(facts: &Facts, dump: &Dump, places: &[Evidence], found: &mut Vec<Finding>) {
    let file = places.first().map(|one| one.place.file);
    let near = |fold: &&Fold| {
        fold.key.family == dump.family
            && Some(fold.file) == file
            && fold
                .addresses
                .iter()
                .any(|address| address >> 12 == dump.iova >> 12)
    };
    let mut folds = facts.folds.folds.iter().filter(near);
    let (Some(fold), None) = (folds.next(), folds.next()) else {
        return;
    };
    let places: Vec<&Evidence> = places.iter().collect();
    if fold.key.class == Class::DeviceEntry {
        device_entry(fold, dump, &places, found);
        return;
    }
    let Some(access) = access(fold.key.direction) else {
        return;
    };
    let Some(end) = end_of(dump, fold.stages.contains(&1), access) else {
        return;
    };
    judge(fold, dump.iova, end, &places, found);
    if end == Walk::Absent {
        let last = dump.absent == Some(Absent::Level(0));
        fault::absent_in_dump(facts, fold, (dump.iova, last), &places, found);
    }
}

/// The root or context entry in the dump, beside the reason that the unit has given.
fn device_entry(fold: &Fold, dump: &Dump, places: &[&Evidence], found: &mut Vec<Finding>) {
    // Reasons 1 and 2: the root or context entry is not present.
    let codes: Vec<_> = fold
        .meanings
        .iter()
        .filter_map(|(code, ..)| *code)
        .collect();
    let table = match codes.as_slice() {
        [1] => DumpTable::Root,
        [2] => DumpTable::Context,
        _ => return,
    };
    let mut entries = dump.entries.iter().rev();
    let entry = entries.find(|one| one.table == table);
    let present = entry.is_some_and(|one| one.words[0] & 1 != 0);
    let name = if table == DumpTable::Root {
        "root"
    } else {
        "context"
    };
    let (cause, text) = match present {
        true => (
            "table.contradicts-fault",
            format!(
                "The {name} entry in the dump is present, and the reported reason says that it is not: it was written between."
            ),
        ),
        false => (
            "table.explains-fault",
            format!("The {name} entry in the dump is not present."),
        ),
    };
    found.push(
        Finding::certain(cause, SOURCE)
            .devices(Some(fold.device.clone()).filter(|device| !device.is_empty()))
            .evidence(&fold.evidence)
            .evidence(places.iter().copied())
            .say(text),
    );
}

/// The end of the walk that the entries show, for this access.
fn end_of(dump: &Dump, first_stage: bool, access: Access) -> Option<Walk> {
    let leaf = dump.entries.iter().rev().find_map(|one| match one.table {
        DumpTable::Page(level) => Some((level, one.words[0])),
        _ => None,
    });
    Some(match (leaf, dump.absent) {
        (_, Some(_)) => Walk::Absent,
        // Level 1, or bit 7 (PS): a leaf. First stage: P and R/W; second stage: R and W.
        (Some((level, word)), None) if level == 1 || word & 1 << 7 != 0 => {
            let (read, write) = match first_stage {
                true => (word & 1 != 0, word & 3 == 3),
                false => (word & 1 != 0, word & 2 != 0),
            };
            let (asked, other) = if access == Access::Write {
                (write, read)
            } else {
                (read, write)
            };
            match (asked, other) {
                (true, _) => Walk::Passes,
                (false, true) => Walk::Denied(true),
                (false, false) => Walk::Absent,
            }
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::{causes, of_text};

    const HEAD: &str = "Device 0000:00:1f.0 @0x105407000\n\
        IOVA_PFN\tPML5E\tPML4E\tPDPE\tPDE\tPTE\n";

    fn row(pfn: u64, leaf: u64) -> String {
        format!(
            "{pfn:#015x} |\t0x0000000000000000\t0x0000000105408003\t0x0000000105409003\t0x000000010540a003\t{leaf:#018x}\n"
        )
    }

    fn fault(access: &str, address: &str, reason: &str) -> String {
        format!(
            "[ 99.0] DMAR: [DMA {access} NO_PASID] Request device [00:1f.0] fault addr {address} [fault reason {reason}] x\n"
        )
    }

    #[test]
    fn walks_explain_or_contradict() {
        let dump = format!("{HEAD}{}{}", row(1, 0x1003), row(2, 0x2001));
        let missing = of_text(&(fault("Read", "0x5000", "0x06") + &dump));
        assert_eq!(
            causes(&missing),
            ["fault.no-access", "table.explains-fault"]
        );
        let mapped = of_text(&(fault("Read", "0x1000", "0x06") + &dump));
        assert_eq!(
            causes(&mapped),
            ["fault.no-access", "table.contradicts-fault"]
        );
        let direction = of_text(&(fault("Write", "0x2000", "0x05") + &dump));
        assert_eq!(
            causes(&direction),
            [
                "fault.no-access",
                "table.explains-fault",
                "fault.wrong-direction"
            ]
        );
    }

    #[test]
    fn an_entry_that_only_the_last_level_lacks_was_unmapped_and_is_for_no_other_direction() {
        let dump = |address: &str, entries: &[(u32, u64)], absent: u32| {
            let entries = entries.iter().map(|(level, value)| {
                format!("[ 99.1] DMAR: pte level: {level}, pte value: {value:#018x}\n")
            });
            format!(
                "{}[ 99.1] DMAR: Dump dmar0 table entries for IOVA {address}\n[ 99.1] DMAR: root entry: 0x00000000094b8001\n\
                 [ 99.1] DMAR: context entry: hi 0x0000000000000302, low 0x00000000096ea001\n{}\
                 [ 99.1] DMAR: page table not present at level {absent}\n",
                fault("Write", address, "0x05"),
                entries.collect::<String>()
            )
        };
        let tables = [(4, 0x96e_d403), (3, 0x96e_e403), (2, 0x96e_f403), (1, 0)];
        let reported = ["fault.no-access", "table.explains-fault"];
        for (address, entries, absent, more) in [
            ("0xffffc000", &tables[..], 0, Some("fault.use-after-unmap")),
            ("0x123400000", &tables[..], 0, None),
            ("0xffffc000", &[(4, 0)][..], 3, None),
        ] {
            let found = of_text(&dump(address, entries, absent));
            let expected: Vec<_> = reported.into_iter().chain(more).collect();
            assert_eq!(causes(&found), expected, "{address}");
        }
        let two = dump("0xffffc000", &tables, 0) + &dump("0xffffd000", &tables, 0);
        let found = of_text(&two);
        let again = found
            .iter()
            .find(|one| one.cause == "fault.use-after-unmap");
        assert_eq!(again.unwrap().addresses.len(), 2);
    }

    #[test]
    fn context_entries_of_debugfs_contradict_faults_without_one() {
        let row = "IOMMU dmar1: Root Table Address: 0x103027000\nB.D.F\tRoot_entry\tContext_entry\n\
            00:1f.0\t0x0000000000000000:0x000000010370c001\t0x0000000000000102:0x000000010370e001\t-1\n";
        let found = of_text(&(fault("Write", "0x5000", "0x02") + row));
        assert_eq!(
            causes(&found),
            ["fault.device-entry", "table.contradicts-fault"]
        );
    }

    #[test]
    fn a_cut_dump_proves_no_absence_and_another_device_nothing() {
        let dump = format!("{HEAD}{}[...]\n", row(1, 0x1003));
        let cut = of_text(&(fault("Read", "0x5000", "0x06") + &dump));
        assert_eq!(causes(&cut), ["fault.no-access", "table.truncated"]);
        let other = of_text(
            &(fault("Read", "0x1000", "0x06").replace("1f.0", "1e.0") + HEAD + &row(1, 0x1003)),
        );
        assert_eq!(causes(&other), ["fault.no-access"]);
    }
}
