//! Devices that the kernel keeps from guests, since firmware demands an identity mapping of a
//! region.
//!
//! A refusal that names its device comes first, then groups whose regions no such refusal has told of, then tables
//! alone. Each takes the regions that it tells of.

use dmaspace::firmware::{FirmwareRegion, FirmwareRegionKind};

use super::{devices, is_dropped};
use crate::explain::facts::{Facts, Known, Line, TableFact};
use crate::explain::finding::{Advice, Evidence, Finding, Place};

const SOURCE: &str = "Linux drivers/iommu/intel/iommu.c, device_is_rmrr_locked (before 6.6); drivers/iommu/iommu.c, __iommu_device_set_domain (since 6.6); Documentation/ABI/testing/sysfs-kernel-iommu_groups";

/// A line of `reserved_regions`: first and last address, and type.
type Reserved = Known<(u64, u64, String)>;

/// Regions, refusals for them, and what findings have told of.
struct Regions<'f> {
    facts: &'f Facts,
    /// Refusals, with the device where the line names it.
    refused: Vec<(Option<String>, &'f Evidence)>,
    /// Regions of groups, of type direct and of type direct-relaxable.
    hard: Vec<&'f Reserved>,
    relaxable: Vec<&'f Reserved>,
    /// Regions of firmware's tables.
    regions: Vec<(&'f Known<TableFact>, &'f FirmwareRegion)>,
    used: Vec<(u64, u64)>,
    places: Vec<&'f Place>,
}

pub(super) fn findings(facts: &Facts, found: &mut Vec<Finding>) {
    let mut regions = Regions::of(facts);
    regions.by_device(found);
    regions.by_line(found);
    regions.by_group(found);
    // Beside faults it is another question.
    if facts.folds.folds.is_empty() {
        regions.by_table(found);
    }
}

fn advised(finding: Finding) -> Finding {
    finding
        .advise(Advice::text(
            "In the firmware's setup: switch off features that share memory with the device (HP: shared memory features of \
             the slot; USB: legacy support), or update the firmware.",
        ))
        .advise(Advice::text("Another function or another device: no question of groups or of ACS."))
}

impl<'f> Regions<'f> {
    fn of(facts: &'f Facts) -> Self {
        let refused: Vec<_> = facts
            .lines
            .iter()
            .filter_map(|one| match &one.fact {
                Line::Ineligible { device } => Some((device.clone(), &one.evidence)),
                _ => None,
            })
            .collect();
        let direct = |name: &str| {
            let all = facts.reserved.iter();
            all.filter(|one| one.fact.2 == name).collect::<Vec<_>>()
        };
        let regions = facts.tables.iter().flat_map(|known| {
            let regions = known.fact.table.regions.iter();
            regions.map(move |region| (known, region))
        });
        Self {
            facts,
            refused,
            hard: direct("direct"),
            relaxable: direct("direct-relaxable"),
            regions: regions.filter(|(_, region)| !is_dropped(region)).collect(),
            used: Vec::new(),
            places: Vec::new(),
        }
    }

    /// Refusals that name the device.
    fn by_device(&mut self, found: &mut Vec<Finding>) {
        let mut names: Vec<String> = self
            .refused
            .iter()
            .filter_map(|(device, _)| device.clone())
            .collect();
        names.sort();
        names.dedup();
        for name in &names {
            let mut finding = Finding::certain("firmware.one-to-one", SOURCE).device(name.clone());
            let lines = self
                .refused
                .iter()
                .filter(|(device, _)| device.as_ref() == Some(name));
            finding = finding.evidence(lines.map(|(_, evidence)| *evidence));
            let own: Vec<_> = self
                .regions
                .iter()
                .filter(|(known, region)| devices(&known.fact.table, region).contains(name))
                .collect();
            for (known, region) in &own {
                finding = finding
                    .range(region.first, region.last)
                    .evidence([&known.place(region.offset)]);
            }
            // A listing of a group is this device's, where a table says so, or where there is only one.
            for one in &self.hard {
                let same = own
                    .iter()
                    .any(|(_, region)| (region.first, region.last) == (one.fact.0, one.fact.1));
                let members = self.facts.region_members(&one.evidence);
                let member = members.iter().any(|one| one.fact.device == *name);
                let foreign = !members.is_empty() && !member
                    || self.regions.iter().any(|(known, region)| {
                        (region.first, region.last) == (one.fact.0, one.fact.1)
                            && !devices(&known.fact.table, region).contains(name)
                    });
                if member || same || names.len() == 1 && !foreign {
                    finding = finding
                        .range(one.fact.0, one.fact.1)
                        .evidence([&one.evidence]);
                    self.used.push((one.fact.0, one.fact.1));
                    self.places.push(&one.evidence.place);
                }
            }
            let text = format!(
                "Firmware demands an identity mapping of a reserved region for {name}, so the kernel refuses to attach it \
                 to a guest's domain."
            );
            found.push(advised(finding.say(text)));
        }
    }

    /// Refusals that name none.
    fn by_line(&self, found: &mut Vec<Finding>) {
        let unnamed: Vec<_> = self
            .refused
            .iter()
            .filter(|(device, _)| device.is_none())
            .collect();
        if !unnamed.is_empty() {
            let finding = Finding::certain("firmware.one-to-one", SOURCE)
                .evidence(unnamed.into_iter().map(|(_, evidence)| *evidence))
                .say("Firmware demands an identity mapping for a device, so the kernel refuses to attach it to a guest's domain.");
            found.push(advised(finding));
        }
    }

    /// Groups with a region of type direct.
    fn by_group(&mut self, found: &mut Vec<Finding>) {
        for one in &self.hard {
            let range = (one.fact.0, one.fact.1);
            // Firmware gives one region to many devices: of another group it is another refusal.
            let members = self.facts.region_members(&one.evidence);
            if self.places.contains(&&one.evidence.place)
                || members.is_empty() && self.used.contains(&range)
            {
                continue;
            }
            let same = self
                .hard
                .iter()
                .filter(|other| (other.fact.0, other.fact.1) == range);
            let same: Vec<_> = same
                .filter(|other| !self.places.contains(&&other.evidence.place))
                .copied()
                .collect();
            let of_table: Vec<_> = self
                .regions
                .iter()
                .filter(|(_, region)| (region.first, region.last) == (one.fact.0, one.fact.1))
                .collect();
            self.used.push(range);
            self.places
                .extend(same.iter().map(|one| &one.evidence.place));
            let mut finding = Finding::certain("firmware.one-to-one", SOURCE)
                .range(range.0, range.1)
                .evidence(same.iter().map(|one| &one.evidence));
            let members = same
                .iter()
                .flat_map(|one| self.facts.region_members(&one.evidence));
            let members: Vec<_> = members.collect();
            // Without the group's members a table names the device.
            let functions = members.iter().filter(|one| {
                let known = self.facts.known(&one.fact.device, None);
                !known.is_some_and(|known| known.fact.is_bridge())
            });
            let functions: Vec<_> = functions.collect();
            finding = finding
                .devices(functions.iter().map(|one| one.fact.device.clone()))
                .evidence(functions.iter().map(|one| &one.evidence));
            for (known, region) in of_table {
                if functions.is_empty() {
                    finding = finding.devices(devices(&known.fact.table, region));
                }
                finding = finding.evidence([&known.place(region.offset)]);
            }
            let text = "The group has a reserved region of type direct, and not direct-relaxable: firmware demands an \
                 identity mapping, so the kernel refuses to give its devices to a guest.";
            found.push(advised(finding.say(text)));
        }
    }

    /// The table alone: graphics and USB are exempt, which it does not show.
    fn by_table(&self, found: &mut Vec<Finding>) {
        for (known, region) in &self.regions {
            let range = (region.first, region.last);
            let relaxed = self
                .relaxable
                .iter()
                .any(|one| (one.fact.0, one.fact.1) == range);
            let told = found
                .iter()
                .any(|one| one.cause == "firmware.one-to-one" && one.addresses.contains(&range));
            let functions = devices(&known.fact.table, region);
            let exempt = !matches!(region.kind, FirmwareRegionKind::Rmr { .. })
                && functions.iter().any(|device| {
                    self.facts.known(device, None).is_some_and(|one| {
                        one.fact.is_display()
                            || one.fact.class.map(|class| class >> 8) == Some(0x0c03)
                    })
                });
            // This machine's groups have told which regions are direct.
            let own = self.facts.own.contains(&known.evidence.place.file);
            if relaxed || told || exempt || own {
                continue;
            }
            let rmr = matches!(region.kind, FirmwareRegionKind::Rmr { .. });
            let (source, text) = match rmr {
                true => (
                    "Arm DEN0049, \"Reserved Memory Range node\"; Linux drivers/acpi/arm64/iort.c, iort_rmr_alloc, iort_get_rmrs",
                    "The IORT has a reserved memory range that must not be mapped elsewhere, for the devices of its stream \
                     ids. The kernel makes it a region of type direct, and refuses the devices to guests: \
                     reserved_regions of their groups decides.",
                ),
                false => (
                    "Linux drivers/iommu/intel/iommu.c, device_rmrr_is_relaxable, intel_iommu_get_resv_regions; drivers/iommu/amd/iommu.c, amd_iommu_get_resv_regions",
                    "The table has a reserved region for the device. The kernel refuses it to guests unless it is a graphics \
                     or USB device, which the table does not show: reserved_regions of its group decides (direct, or \
                     direct-relaxable).",
                ),
            };
            let finding = Finding::likely("firmware.one-to-one", source)
                .devices(functions)
                .range(region.first, region.last)
                .evidence([&known.place(region.offset)])
                .say(text);
            found.push(advised(finding));
        }
    }
}
