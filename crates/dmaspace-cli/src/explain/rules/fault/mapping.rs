//! Mappings that a driver of the host made or took down: for the other direction only, or unmapped too early.

use iommu::log::{Class, Family};

use super::{ALLOCATOR, MSI, for_driver, is_hosts, likely, of_addresses, tables_file, walked, who};
use crate::explain::facts::{Facts, Line};
use crate::explain::finding::{At, Certainty, Direction, Evidence, Finding};
use crate::explain::folds::Fold;

/// An address of the kernel's allocator, or an entry that forbids the access.
pub(super) fn allocated(facts: &Facts, fold: &Fold, found: &mut Vec<Finding>, all: &[u64]) {
    let recent: Vec<u64> = all
        .iter()
        .copied()
        .filter(|address| ALLOCATOR.contains(address) && !MSI.contains(address))
        .collect();
    let other = matches!(fold.key.direction, Direction::Read | Direction::Write);
    let class = fold.key.class;
    let direction = class == Class::Permission || class == Class::NoAccess && !recent.is_empty();
    if direction
        && other
        && is_hosts(facts, fold)
        && !all
            .iter()
            .all(|address| MSI.contains(address) || *address < 0x1000)
    {
        let (access, right) = match fold.key.direction {
            Direction::Read => ("reads", "DMA_TO_DEVICE"),
            _ => ("writes", "DMA_FROM_DEVICE"),
        };
        let decides = match tables_file(fold) {
            Some(_) => "A walk of the tables or dma-debug decides.",
            None => "dma-debug decides.",
        };
        let text = match class {
            Class::Permission => format!(
                "{} {access} a page whose mapping permits the other direction only, or a mapping was taken down and a \
                 stale or other one of the page is left. {decides}",
                who(fold)
            ),
            _ => format!(
                "{} {access} at an address just below 4 GiB, where Linux's allocator gives addresses first, so it was \
                 allocated recently: likely for the other direction only, or unmapped too early. {decides}",
                who(fold)
            ),
        };
        let finding = likely(fold, "fault.wrong-direction", "Linux Documentation/core-api/dma-api.rst, DMA directions; drivers/iommu/dma-iommu.c, iommu_dma_alloc_iova")
            .say(text);
        let finding = for_driver(
            facts,
            fold,
            finding,
            &format!(
                "In the driver: map the buffer with {right} or DMA_BIDIRECTIONAL before the device gets it."
            ),
        );
        let finding = match recent.first().or(all.first()) {
            Some(address) => walked(fold, *address, finding),
            None => finding,
        };
        found.push(of_addresses(
            finding,
            if class == Class::Permission {
                all
            } else {
                &recent
            },
        ));
    }
    // SMMUv2 tells the level: 3 is the last one of 4 KiB tables.
    let last = fold.levels.len() == 1 && fold.levels.contains(&3);
    let soft = soft_absent(facts, fold);
    if class == Class::NotMapped
        && last
        && !recent.is_empty()
        && soft.is_none()
        && is_hosts(facts, fold)
    {
        found.push(use_after_unmap(facts, fold, &recent, None));
    }
}

/// A dump has no entry for `address`: it was not mapped for another direction, and where only the `last` level has none,
/// it was mapped until recently.
pub(in crate::explain::rules) fn absent_in_dump(
    facts: &Facts,
    fold: &Fold,
    (address, last): (u64, bool),
    places: &[&Evidence],
    found: &mut Vec<Finding>,
) {
    let of_fold = |one: &Finding, cause: &str| {
        one.cause == cause
            && one.devices == [fold.device.clone()]
            && one.access == fold.key.direction
    };
    found.retain_mut(|one| {
        let doubted = of_fold(one, "fault.wrong-direction") && one.certainty == Certainty::Likely;
        if doubted {
            one.addresses
                .retain(|(first, _)| first >> 12 != address >> 12);
        }
        !doubted || !one.addresses.is_empty()
    });
    if !last || !ALLOCATOR.contains(&address) || MSI.contains(&address) || !is_hosts(facts, fold) {
        return;
    }
    let places = places.iter().copied();
    let known = found
        .iter()
        .position(|one| of_fold(one, "fault.use-after-unmap"));
    let finding = match known {
        Some(known) => found.remove(known).range(address, address),
        None => use_after_unmap(facts, fold, &[address], None),
    };
    found.push(finding.evidence(places));
}

fn use_after_unmap(
    facts: &Facts,
    fold: &Fold,
    addresses: &[u64],
    walk: Option<&Evidence>,
) -> Finding {
    let by = match walk {
        Some(_) => "By the kernel's own walk the page is not mapped now",
        None => "Only the last level has no entry, so neighbours are or were mapped",
    };
    let finding = likely(fold, "fault.use-after-unmap", "Arm IHI 0062, SMMU_CBn_FSYNR0.PLVL; Linux drivers/iommu/arm/arm-smmu/arm-smmu-qcom.c, qcom_smmu_context_fault; drivers/iommu/intel/iommu.c, pgtable_walk")
        .say(format!(
            "{by}: {} likely still uses a buffer that was unmapped until recently.",
            who(fold)
        ));
    let finding = for_driver(
        facts,
        fold,
        finding,
        "Stop or drain the device before its buffers are unmapped or freed; dma-debug names the owner.",
    );
    of_addresses(finding.evidence(walk), addresses)
}

/// The kernel's own walk after the fault, which found no page.
fn soft_absent<'f>(facts: &'f Facts, fold: &Fold) -> Option<&'f Evidence> {
    let line_of = |evidence: &Evidence| match evidence.place.at {
        At::Line(line) => line,
        _ => 0,
    };
    let walks = facts
        .lines
        .iter()
        .filter(|one| one.fact == Line::SoftWalk { physical: 0 });
    walks
        .map(|one| &one.evidence)
        .find(|walk| {
            let before = |fold: &Fold| {
                let own = fold
                    .evidence
                    .iter()
                    .filter(|one| one.place.file == walk.place.file);
                own.map(line_of).filter(|line| *line <= line_of(walk)).max()
            };
            let smmu =
                |other: &&Fold| other.key.family == Family::SmmuV2 && other.file == walk.place.file;
            let nearest = facts
                .folds
                .folds
                .iter()
                .filter(smmu)
                .filter_map(before)
                .max();
            fold.file == walk.place.file && before(fold).is_some() && before(fold) == nearest
        })
        .filter(|_| fold.key.family == Family::SmmuV2)
}

/// No page by the kernel's own walk.
pub(super) fn soft_walk(facts: &Facts, fold: &Fold, found: &mut Vec<Finding>) {
    if fold.key.class != Class::NotMapped {
        return;
    }
    if let Some(walk) = soft_absent(facts, fold) {
        let all: Vec<u64> = fold.addresses.iter().copied().collect();
        found.push(use_after_unmap(facts, fold, &all, Some(walk)));
    }
}
