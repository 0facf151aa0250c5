//! Options of units: those that are off, strict by another option, or of another vendor.

use std::collections::BTreeMap;

use super::known::OFF;
use crate::explain::facts::{Facts, Known, Vendor};
use crate::explain::finding::{Advice, Certainty, Evidence, Finding};

/// Options that do nothing while the unit is off.
pub(super) fn switched_off(
    facts: &Facts,
    one: &Known<String>,
    settings: &BTreeMap<String, Vec<String>>,
    found: &mut Vec<Finding>,
) {
    let machine = vendor(facts);
    for (name, of) in OFF {
        let state = settings
            .get(&format!("{name}: state"))
            .and_then(|values| values.last());
        if state.is_none_or(|state| *state != format!("{name}=off")) {
            continue;
        }
        let certainty = match (of, &machine) {
            (None, _) => Certainty::Certain,
            (Some(of), Some((vendor, _))) if of == *vendor => Certainty::Certain,
            // Another vendor's unit, which is not off.
            (Some(_), Some(_)) => continue,
            (Some(_), None) => Certainty::Likely,
        };
        let foreign = |option: &str| {
            let other = |(other, vendor): &(&str, Option<Vendor>)| {
                vendor.is_some() && *other != name && option.starts_with(other)
            };
            of.is_some() && OFF.iter().any(other)
        };
        // Repetitions of the state itself are another finding.
        let dead = settings
            .iter()
            .filter(|(setting, _)| **setting != format!("{name}: state"))
            .filter(|(setting, _)| {
                setting.as_str() == "default domain"
                    || setting.as_str() == "strict invalidation"
                    || setting.starts_with("intel_iommu: ")
                    || setting.starts_with("amd_iommu: ")
            })
            .filter_map(|(_, values)| values.last())
            .filter(|option| !foreign(option) && !option.ends_with("=off"));
        let dead: Vec<&str> = dead.map(String::as_str).collect();
        let given = settings.get("vfio_pci.ids").and_then(|all| all.last());
        if dead.is_empty() && given.is_none() {
            continue;
        }
        let mut text = format!("{name}=off switches the unit off");
        match of {
            Some(_) if certainty == Certainty::Likely => text += ", where it is this vendor's",
            _ => {}
        }
        if !dead.is_empty() {
            let verb = if dead.len() == 1 { "does" } else { "do" };
            text += &format!(": {} {verb} nothing", dead.join(", "));
        }
        if let Some(given) = given {
            text += &format!("; VFIO finds no unit for the devices of {given}");
        }
        let mut finding = Finding::new("option.without-effect", certainty, "Linux arch/x86/kernel/pci-dma.c, iommu_setup; drivers/iommu/intel/iommu.c, intel_iommu_init; drivers/iommu/amd/init.c, amd_iommu_detect")
            .evidence([&one.evidence]);
        if let Some((_, places)) = machine.as_ref().filter(|_| of.is_some()) {
            finding = finding.evidence(places.iter().copied());
        }
        found.push(
            finding
                .say(format!("{text}."))
                .advise(Advice::text(format!("Remove {name}=off, or the others."))),
        );
    }
}

/// A lazy mode that a vendor's option takes back: options of vendors come after the early ones.
pub(super) fn strict(
    one: &Known<String>,
    settings: &BTreeMap<String, Vec<String>>,
    found: &mut Vec<Finding>,
) {
    let last = |setting: &str| settings.get(setting).and_then(|values| values.last());
    let lazy = last("strict invalidation").filter(|option| {
        let value = option.rsplit('=').next().unwrap_or_default();
        value.starts_with(['0', 'n', 'N', 'f', 'F']) || value.to_ascii_lowercase().starts_with("of")
    });
    for vendors in ["intel_iommu: strict", "amd_iommu: strict"] {
        if let (Some(lazy), Some(strict)) = (lazy, last(vendors)) {
            let finding = Finding::certain("option.without-effect", "Linux drivers/iommu/iommu.c, iommu_dma_setup (early), iommu_set_dma_strict; drivers/iommu/intel/iommu.c, intel_iommu_setup; drivers/iommu/amd/init.c, parse_amd_iommu_options")
                .evidence([&one.evidence])
                .say(format!(
                    "{lazy} and {strict} contradict each other: {strict} is read later, in either order, so that \
                     flushing is strict and {lazy} does nothing."
                ))
                .advise(Advice::text(format!("Remove {strict} for lazy flushing, or {lazy}.")));
            found.push(finding);
        }
    }
}

/// The vendor of the machine's unit, where all of the input agrees.
fn vendor(facts: &Facts) -> Option<(Vendor, Vec<&Evidence>)> {
    let mut all: Vec<_> = facts
        .vendors
        .iter()
        .map(|one| (one.fact, &one.evidence))
        .collect();
    for known in facts.functions.values() {
        // The host bridge, or AMD's own function of the unit.
        let class = known.fact.class.map(|class| class >> 8);
        let vendor = match (class, known.fact.vendor) {
            (Some(0x0600), Some(0x8086)) => Vendor::Intel,
            (Some(0x0600 | 0x0806), Some(0x1022)) => Vendor::Amd,
            _ => continue,
        };
        all.push((vendor, &known.evidence));
    }
    let (first, _) = *all.first()?;
    let agreed = all.iter().all(|(vendor, _)| *vendor == first);
    agreed.then(|| {
        (
            first,
            all.into_iter()
                .map(|(_, evidence)| evidence)
                .take(4)
                .collect(),
        )
    })
}

pub(super) fn other_vendor(
    facts: &Facts,
    one: &Known<String>,
    options: &[(Vendor, String)],
    found: &mut Vec<Finding>,
) {
    let Some((vendor, places)) = vendor(facts) else {
        return;
    };
    // The kernel reads the options of all drivers, and these set the mode of any unit (`iommu_set_dma_strict`).
    let of_any = |option: &str| {
        let mut values = option.split(['=', ',']).skip(1);
        values.any(|value| ["strict", "fullflush"].contains(&value))
    };
    let others = options
        .iter()
        .filter(|(of, option)| *of != vendor && !of_any(option));
    for (of, option) in others {
        let name = |vendor: Vendor| match vendor {
            Vendor::Intel => "Intel's",
            Vendor::Amd => "AMD's",
            Vendor::Arm => "Arm's",
            Vendor::Riscv => "a RISC-V",
        };
        let finding = Finding::certain(
            "option.other-vendor",
            "Linux Documentation/admin-guide/kernel-parameters.txt",
        )
        .evidence([&one.evidence])
        .evidence(places.iter().copied())
        .say(format!(
            "{option} is an option of {} unit, and this machine has {} one: it does nothing here.",
            name(*of),
            name(vendor)
        ))
        .advise(Advice::text(match vendor {
            Vendor::Intel => "intel_iommu=on",
            _ => "Remove the option: the unit is on by itself.",
        }));
        found.push(finding);
    }
}
