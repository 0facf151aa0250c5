//! The kernel's command line.
//!
//! Sources: Linux 7.2 `Documentation/admin-guide/kernel-parameters.txt`; `drivers/iommu/intel/iommu.c`
//! (`intel_iommu_setup`), `drivers/iommu/amd/init.c` (`parse_amd_iommu_options`), `drivers/iommu/iommu.c`
//! (`iommu_set_def_domain_type`, `iommu_dma_setup`), `arch/x86/kernel/pci-dma.c` (`iommu_setup`),
//! `drivers/iommu/irq_remapping.c` (`setup_irqremap`), `lib/kstrtox.c` (`kstrtobool`), `kernel/params.c` (`parameq`:
//! `-` and `_` are the same in names), `init/main.c` (early options come before the others, whatever their order),
//! `mm/hugetlb.c` (`hugepages_setup`, `hugepagesz_setup`), `Documentation/admin-guide/mm/hugetlbpage.rst`.

use std::collections::{BTreeMap, BTreeSet};

use super::super::facts::{Facts, Known, Vendor};
use super::super::finding::{Advice, Certainty, Evidence, Finding, quoted};

/// An option whose values are known.
struct Setting {
    name: &'static str,
    values: Values,
    /// The option is for units of this vendor only.
    vendor: Option<Vendor>,
}

/// Values of an option.
enum Values {
    /// Words of a list, each with the setting that it changes: the last one of a setting wins.
    List(&'static [(&'static str, &'static str)]),
    /// Yes or no, for this setting.
    Bool(&'static str),
    /// Any value: a parameter of a module, of which the last one counts.
    Any,
}

const fn any(name: &'static str) -> Setting {
    Setting {
        name,
        values: Values::Any,
        vendor: None,
    }
}

const OPTIONS: [Setting; 15] = [
    any("vfio_pci.ids"),
    any("vfio_iommu_type1.dma_entry_limit"),
    any("default_hugepagesz"),
    any("swiotlb"),
    Setting {
        name: "vfio_iommu_type1.allow_unsafe_interrupts",
        values: Values::Bool("unsafe interrupts"),
        vendor: None,
    },
    Setting {
        name: "iommu.forcedac",
        values: Values::Bool("forced 64-bit addresses"),
        vendor: None,
    },
    Setting {
        name: "arm_smmu.disable_bypass",
        values: Values::Bool("bypass of SMMUv2"),
        vendor: None,
    },
    Setting {
        name: "arm_smmu_v3.disable_bypass",
        values: Values::Bool("bypass of SMMUv3"),
        vendor: None,
    },
    Setting {
        name: "intel_iommu",
        values: Values::List(&[
            ("on", "state"),
            ("off", "state"),
            ("igfx_off", "igfx"),
            ("forcedac", "forcedac"),
            ("strict", "strict"),
            ("sp_off", "superpages"),
            ("sm_on", "scalable mode"),
            ("sm_off", "scalable mode"),
            ("tboot_noforce", "tboot"),
        ]),
        vendor: Some(Vendor::Intel),
    },
    Setting {
        name: "amd_iommu",
        values: Values::List(&[
            ("fullflush", "strict"),
            ("off", "state"),
            ("force_isolation", "isolation"),
            ("force_enable", "state"),
            ("pgtbl_v1", "page tables"),
            ("pgtbl_v2", "page tables"),
            ("irtcachedis", "interrupt cache"),
            ("nohugepages", "page sizes"),
            ("v2_pgsizes_only", "page sizes"),
        ]),
        vendor: Some(Vendor::Amd),
    },
    Setting {
        name: "amd_iommu_intr",
        values: Values::List(&[("legacy", "interrupts"), ("vapic", "interrupts")]),
        vendor: Some(Vendor::Amd),
    },
    Setting {
        name: "iommu",
        values: Values::List(&[
            ("off", "state"),
            ("force", "force"),
            ("noforce", "force"),
            ("biomerge", "merge"),
            ("panic", "panic"),
            ("nopanic", "panic"),
            ("merge", "merge"),
            ("nomerge", "merge"),
            ("forcesac", "sac"),
            ("allowdac", "dac"),
            ("nodac", "dac"),
            ("usedac", "dac"),
            ("soft", "soft"),
            ("pt", "default domain"),
            ("nopt", "default domain"),
            // GART's, where it is built in: arch/x86/kernel/amd_gart_64.c, gart_parse_options.
            ("leak", "gart"),
            ("fullflush", "gart flush"),
            ("nofullflush", "gart flush"),
            ("noagp", "gart agp"),
            ("noaperture", "gart aperture"),
            ("memaper", "gart memory"),
        ]),
        vendor: None,
    },
    Setting {
        name: "iommu.passthrough",
        values: Values::Bool("default domain"),
        vendor: None,
    },
    Setting {
        name: "iommu.strict",
        values: Values::Bool("strict invalidation"),
        vendor: None,
    },
    Setting {
        name: "intremap",
        values: Values::List(&[
            ("on", "state"),
            ("off", "state"),
            ("nosid", "sid"),
            ("no_x2apic_optout", "x2apic"),
            ("nopost", "post"),
            ("posted_msi", "posted msi"),
        ]),
        vendor: None,
    },
];

/// Words that `kstrtobool` takes, by their beginning.
fn is_bool(value: &str) -> bool {
    let mut letters = value.chars();
    match letters.next() {
        Some('y' | 'Y' | 't' | 'T' | '1' | 'n' | 'N' | 'f' | 'F' | '0') => true,
        Some('o' | 'O') => matches!(letters.next(), Some('n' | 'N' | 'f' | 'F')),
        _ => false,
    }
}

/// Names that Linux does not have, with the option that was meant. The name of a parameter is behind that of its module.
const UNKNOWN: [(&str, &str); 21] = [
    ("vfio.ids", "vfio-pci.ids="),
    ("vfio_ids", "vfio-pci.ids="),
    ("vfio_pci_ids", "vfio-pci.ids="),
    ("vfio_pci.id", "vfio-pci.ids="),
    ("vfio_pci.pci_ids", "vfio-pci.ids="),
    ("vfiopci.ids", "vfio-pci.ids="),
    (
        "vfio_pci.disable_hugepages",
        "vfio_iommu_type1.disable_hugepages=",
    ),
    (
        "vfio_iommu_type1.allow_unsafe_interrupt",
        "vfio_iommu_type1.allow_unsafe_interrupts=1",
    ),
    (
        "vfio_pci.allow_unsafe_interrupts",
        "vfio_iommu_type1.allow_unsafe_interrupts=1",
    ),
    (
        "allow_unsafe_interrupts",
        "vfio_iommu_type1.allow_unsafe_interrupts=1",
    ),
    ("iommu_passthrough", "iommu.passthrough=1"),
    ("iommu_pt", "iommu=pt, or iommu.passthrough=1"),
    ("iommu.pt", "iommu=pt, or iommu.passthrough=1"),
    ("intel_iommu.passthrough", "iommu.passthrough=1"),
    ("amd_iommu.passthrough", "iommu.passthrough=1"),
    ("iommu_strict", "iommu.strict=1"),
    ("intel_iommu_on", "intel_iommu=on"),
    ("hugepagesize", "hugepagesz="),
    ("hugepage", "hugepages="),
    ("default_hugepages", "default_hugepagesz="),
    ("transparent_hugepages", "transparent_hugepage="),
];

/// Options that do nothing without `=` and a value, with the one that was meant.
const BARE: [(&str, &str); 3] = [
    ("intel_iommu", "intel_iommu=on"),
    ("amd_iommu", "no option: AMD's unit is on without one"),
    ("iommu", "iommu=pt, or intel_iommu=on"),
];

/// Deciding values of the options that switch units off.
const OFF: [(&str, Option<Vendor>); 3] = [
    ("iommu", None),
    ("intel_iommu", Some(Vendor::Intel)),
    ("amd_iommu", Some(Vendor::Amd)),
];

pub(super) fn findings(facts: &Facts, found: &mut Vec<Finding>) {
    // A log and /proc/cmdline show the same line.
    let mut seen = BTreeSet::new();
    for one in &facts.command_lines {
        if seen.insert(one.fact.trim()) {
            line(facts, one, found);
        }
    }
}

/// Options up to `--`, behind which are those of init; a name without `=` has no value.
fn words(line: &str) -> impl Iterator<Item = (String, Option<&str>)> {
    let words = line.split_whitespace().take_while(|word| *word != "--");
    words.map(|word| {
        let word = word.trim_matches('"');
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (word, None),
        };
        // Linux takes - for _ in names.
        (name.replace('-', "_"), value)
    })
}

/// The word of a list: Linux compares as many letters as the word has.
fn known_word(
    known: &'static [(&'static str, &'static str)],
    part: &str,
) -> Option<(&'static str, &'static str)> {
    let name = part.split('=').next().unwrap_or(part);
    let exact = known.iter().find(|(word, _)| *word == name);
    let begins = || known.iter().find(|(word, _)| part.starts_with(word));
    exact.or_else(begins).copied()
}

fn line(facts: &Facts, one: &Known<String>, found: &mut Vec<Finding>) {
    // Settings with their values in order: a setting may be reached by two options.
    let mut settings: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut unknown = Vec::new();
    let mut vendors = Vec::new();
    for (name, value) in words(&one.fact) {
        names(one, &name, value, found);
        let Some(value) = value else {
            continue;
        };
        let Some(option) = OPTIONS.iter().find(|option| option.name == name) else {
            continue;
        };
        if let Some(vendor) = option.vendor {
            vendors.push((vendor, format!("{name}={value}")));
        }
        match &option.values {
            Values::Any => {
                let shown = format!("{name}={value}");
                settings.entry(name.clone()).or_default().push(shown);
            }
            Values::Bool(setting) => {
                let shown = format!("{name}={value}");
                match is_bool(value) {
                    true => settings
                        .entry((*setting).to_owned())
                        .or_default()
                        .push(shown),
                    false => unknown.push((name.clone(), value.to_owned())),
                }
            }
            Values::List(known) => {
                for part in value.split(',').filter(|part| !part.is_empty()) {
                    match known_word(known, part) {
                        Some((_, "default domain")) => {
                            settings
                                .entry("default domain".into())
                                .or_default()
                                .push(format!("{name}={part}"));
                        }
                        Some((_, setting)) => {
                            let setting = format!("{name}: {setting}");
                            settings
                                .entry(setting)
                                .or_default()
                                .push(format!("{name}={part}"));
                        }
                        None => unknown.push((name.clone(), part.to_owned())),
                    }
                }
            }
        }
    }
    switched_off(facts, one, &settings, found);
    strict(one, &settings, found);
    pools(facts, one, found);
    for (setting, values) in settings {
        let [before @ .., last] = values.as_slice() else {
            continue;
        };
        if before.is_empty() {
            continue;
        }
        let finding = Finding::certain("option.repeated", "Linux Documentation/admin-guide/kernel-parameters.rst; init/main.c, parse_args; drivers/iommu/iommu.c, iommu_set_def_domain_type")
            .evidence([&one.evidence])
            .say(format!(
                "The setting \"{setting}\" is given {} times ({}): the last one wins, {last}, and the others are dead.",
                values.len(),
                values.join(", ")
            ))
            .advise(Advice::text(format!("Keep one: {}, or the intended value.", literal(last))));
        found.push(finding);
    }
    for (name, value) in unknown {
        let hint = match (name.as_str(), value.as_str()) {
            ("amd_iommu", "on") => {
                "AMD's unit is on without an option; amd_iommu=on does nothing".to_owned()
            }
            ("intel_iommu" | "amd_iommu", "pt" | "passthrough") => {
                "The identity mapping is iommu=pt, or iommu.passthrough=1".into()
            }
            ("intel_iommu", "1" | "yes" | "true" | "enable" | "enabled") => {
                "The option is intel_iommu=on".into()
            }
            ("iommu", "on" | "1") => {
                "For Intel the option is intel_iommu=on; AMD's unit is on without one".into()
            }
            ("iommu", "strict") => "The option is iommu.strict=1".into(),
            _ => format!(
                "Known values of {}= are in Linux's kernel-parameters",
                literal(&name)
            ),
        };
        let finding = Finding::certain("option.unknown-value", "Linux Documentation/admin-guide/kernel-parameters.txt; drivers/iommu/intel/iommu.c, intel_iommu_setup; drivers/iommu/amd/init.c, parse_amd_iommu_options; arch/x86/kernel/pci-dma.c, iommu_setup")
            .evidence([&one.evidence])
            .say(format!("{name}= has no value {value:?}: the kernel ignores it."))
            .advise(Advice::text(format!("{hint}.")));
        found.push(finding);
    }
    other_vendor(facts, one, &vendors, found);
}

/// Names that do not exist, and options without their value.
fn names(one: &Known<String>, name: &str, value: Option<&str>, found: &mut Vec<Finding>) {
    const SOURCE: &str = "Linux Documentation/admin-guide/kernel-parameters.txt; kernel/params.c, parse_args; drivers/vfio/pci/vfio_pci.c, drivers/vfio/vfio_iommu_type1.c, module parameters";
    let shown = match value {
        Some(value) => format!("{name}={value}"),
        None => name.to_owned(),
    };
    if name == "pcie_acs_override" {
        let finding = Finding::new("option.unknown-value", Certainty::Unknown, SOURCE)
            .evidence([&one.evidence])
            .say(
                "Linux has no option pcie_acs_override: only kernels with a patch of distributions know it, and the line \
                 does not tell whether this one has it.",
            )
            .advise(Advice::text(
                "Compare the groups with and without it: where they are the same, the option does nothing.",
            ));
        found.push(finding);
        return;
    }
    let unknown = UNKNOWN.iter().find(|(known, _)| *known == name);
    let bare = BARE
        .iter()
        .find(|(known, _)| *known == name && value.is_none());
    let (what, meant) = match (unknown, bare) {
        (Some((_, meant)), _) => (
            format!("Linux has no option {name}: it ignores {shown}."),
            meant,
        ),
        (None, Some((_, meant))) => (format!("{name} without a value does nothing."), meant),
        (None, None) => return,
    };
    let finding = Finding::certain("option.unknown-value", SOURCE)
        .evidence([&one.evidence])
        .say(what)
        .advise(Advice::text(format!("Likely meant: {meant}.")));
    found.push(finding);
}

/// Options that do nothing while the unit is off.
fn switched_off(
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
fn strict(one: &Known<String>, settings: &BTreeMap<String, Vec<String>>, found: &mut Vec<Finding>) {
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

/// Sizes and numbers of huge pages, in their order.
fn pools(facts: &Facts, one: &Known<String>, found: &mut Vec<Finding>) {
    const SOURCE: &str = "Linux Documentation/admin-guide/mm/hugetlbpage.rst; mm/hugetlb.c, hugepages_setup, hugepagesz_setup, default_hugepagesz_setup";
    // Numbers before any size, and the size that waits for its number.
    let (mut early, mut size): (Option<String>, Option<String>) = (None, None);
    let mut sized = false;
    for (name, value) in words(&one.fact) {
        let Some(value) = value else {
            continue;
        };
        let shown = format!("{name}={value}");
        match name.as_str() {
            "hugepagesz" | "default_hugepagesz" => {
                sized = true;
                size = Some(shown).filter(|_| name == "hugepagesz");
                missing_size(facts, one, &name, value, found);
            }
            "hugepages" if sized => size = None,
            "hugepages" => early = Some(shown),
            _ => {}
        }
    }
    if let (Some(early), Some(size)) = (early, size) {
        let finding = Finding::certain("option.without-effect", SOURCE)
            .evidence([&one.evidence])
            .say(format!(
                "{early} stands before {size}, so that it is of the default size; no number follows {size}, which gets no \
                 pages at boot."
            ))
            .advise(Advice::text(format!("The size first: {size} {early}.")));
        found.push(finding);
    }
}

/// A size that this machine does not have: its pools are there whether they have pages or not.
fn missing_size(
    facts: &Facts,
    one: &Known<String>,
    name: &str,
    value: &str,
    found: &mut Vec<Finding>,
) {
    let own = |file: usize| facts.own.contains(&file);
    let pools = facts.pools.iter();
    let pools = pools.filter(|pool| pool.fact.node.is_none() && own(pool.evidence.place.file));
    let pools: Vec<_> = pools.collect();
    let unit = match value.trim_start_matches(|c: char| c.is_ascii_digit()) {
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        "" => 0,
        _ => return,
    };
    let digits = value.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let Some(bytes) = digits
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(1 << unit))
    else {
        return;
    };
    let there = pools.iter().any(|pool| pool.fact.page_bytes == bytes);
    if pools.is_empty() || there || !own(one.evidence.place.file) {
        return;
    }
    let sizes: Vec<String> = pools
        .iter()
        .map(|pool| crate::size::bytes(pool.fact.page_bytes))
        .collect();
    let finding = Finding::certain("option.unknown-value", "Linux mm/hugetlb.c, hugepagesz_setup, default_hugepagesz_setup; arch/x86/mm/hugetlbpage.c, arch_hugetlb_valid_size")
        .evidence([&one.evidence])
        .evidence(pools.iter().map(|pool| &pool.evidence))
        .say(format!(
            "{name}={value}: this machine has huge pages of {} and none of this size, so that the kernel ignores it.",
            sizes.join(", ")
        ))
        .advise(Advice::text("A size that /sys/kernel/mm/hugepages shows."));
    found.push(finding);
}

/// A setting as it is typed: with a shell's quotes, unless it has only letters, digits and signs of settings.
fn literal(setting: &str) -> String {
    let harmless = |byte: u8| byte.is_ascii_alphanumeric() || b"=.,:_-/@+".contains(&byte);
    match setting.bytes().all(harmless) {
        true => setting.to_owned(),
        false => quoted(setting),
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

fn other_vendor(
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

#[cfg(test)]
mod tests {
    use super::super::super::finding::Certainty;
    use super::super::{causes, of_text};

    #[test]
    fn the_last_of_a_setting_wins() {
        assert_eq!(
            causes(&of_text("root=/dev/sda1 iommu=pt iommu.passthrough=0\n")),
            ["option.repeated"]
        );
        assert_eq!(
            causes(&of_text(
                "root=/dev/sda1 intel_iommu=on intel_iommu=igfx_off iommu=pt\n"
            )),
            [""; 0]
        );
        assert_eq!(
            causes(&of_text("root=/dev/sda1 intel_iommu=on,off\n")),
            ["option.repeated"]
        );
        assert_eq!(
            causes(&of_text(
                "root=/dev/sda1 iommu.strict=1 -- iommu.strict=0\n"
            )),
            [""; 0]
        );
    }

    #[test]
    fn options_of_a_unit_that_is_off_do_nothing() {
        let of = |line: &str| {
            let found = of_text(&format!("root=/dev/sda1 {line}\n"));
            let named = |one: &&super::Finding| one.cause == "option.without-effect";
            found
                .iter()
                .find(named)
                .map(|one| (one.certainty, one.text.clone()))
        };
        for (line, part) in [
            (
                "iommu=off iommu.passthrough=1",
                "iommu.passthrough=1 does nothing",
            ),
            ("iommu=off intel_iommu=on", "intel_iommu=on does nothing"),
            ("iommu=off vfio-pci.ids=10de:1", "VFIO finds no unit"),
        ] {
            let (certainty, text) = of(line).unwrap();
            assert!(
                certainty == Certainty::Certain && text.contains(part),
                "{text}"
            );
        }
        // The line alone does not tell whose unit it is.
        let (certainty, text) = of("intel_iommu=off iommu=pt").unwrap();
        assert!(certainty == Certainty::Likely, "{text}");
        let (certainty, _) =
            of("intel_iommu=off iommu=pt\n[  1.0] DMAR: Host address width 39").unwrap();
        assert_eq!(certainty, Certainty::Certain);
        for quiet in [
            "intel_iommu=off iommu=pt\n[  1.0] AMD-Vi: Interrupt remapping enabled",
            "intel_iommu=off",
            "intel_iommu=off amd_iommu=pgtbl_v2",
            "intel_iommu=on iommu=pt",
            "iommu=off iommu=pt iommu=soft amd_iommu=off",
        ] {
            let found = of(quiet);
            let right = quiet.starts_with("iommu=off") == found.is_some();
            assert!(right, "{quiet}: {found:?}");
        }
    }

    #[test]
    fn a_vendors_strict_option_wins_whatever_the_order() {
        for line in [
            "iommu.strict=0 intel_iommu=on,strict",
            "intel_iommu=strict iommu.strict=0",
            "amd_iommu=fullflush iommu.strict=off",
        ] {
            let found = of_text(&format!("root=/dev/sda1 {line}\n"));
            assert_eq!(causes(&found), ["option.without-effect"], "{line}");
            assert!(found[0].text.contains("flushing is strict"), "{line}");
        }
        let agreed = of_text("root=/dev/sda1 iommu.strict=1 intel_iommu=strict\n");
        assert_eq!(causes(&agreed), [""; 0]);
    }

    #[test]
    fn names_that_do_not_exist_are_named_with_the_one_that_was_meant() {
        for (line, meant) in [
            ("vfio.ids=10de:1187", "vfio-pci.ids="),
            ("vfio-pci-ids=10de:1187", "vfio-pci.ids="),
            ("iommu_passthrough=1", "iommu.passthrough=1"),
            ("intel_iommu quiet splash ro", "intel_iommu=on"),
            ("allow_unsafe_interrupts=1", "vfio_iommu_type1."),
            ("intel_iommu=1", "intel_iommu=on"),
            ("hugepagesize=1G", "hugepagesz="),
        ] {
            let found = of_text(&format!("root=/dev/sda1 {line}\n"));
            assert_eq!(causes(&found), ["option.unknown-value"], "{line}");
            let advice = found[0].advice[0].line();
            assert!(advice.contains(meant), "{line}: {advice}");
        }
        // A kernel may have the patch; and - is _ in names.
        let patch = of_text("root=/dev/sda1 pcie_acs_override=downstream,multifunction\n");
        assert_eq!(patch[0].certainty, Certainty::Unknown);
        for known in [
            "intel-iommu=on",
            "vfio-pci.ids=10de:1187",
            "vfio_pci.ids=10de:1187",
            "vfio_iommu_type1.allow_unsafe_interrupts=1",
            "pci-stub.ids=10de:1187",
            "intel_iommu=on,sm_on",
        ] {
            let found = of_text(&format!("root=/dev/sda1 {known}\n"));
            assert_eq!(causes(&found), [""; 0], "{known}");
        }
    }

    #[test]
    fn numbers_of_huge_pages_follow_their_size() {
        let of = |line: &str| causes(&of_text(&format!("root=/dev/sda1 {line}\n")));
        assert_eq!(of("hugepages=4 hugepagesz=1G"), ["option.without-effect"]);
        for right in [
            "hugepagesz=1G hugepages=4",
            "hugepagesz=1G hugepages=4 hugepagesz=2M hugepages=512",
            "default_hugepagesz=1G hugepagesz=1G hugepages=4",
            "default_hugepagesz=1G hugepages=4",
            "hugepages=512 hugepagesz=1G hugepages=4",
            "hugepages=512",
            "hugepages=512 default_hugepagesz=1G",
        ] {
            assert_eq!(of(right), [""; 0], "{right}");
        }
    }

    #[test]
    fn a_line_that_two_files_show_is_one() {
        let line = "root=/dev/sda1 iommu=pt iommu=nopt";
        let found = of_text(&format!("[  0.1] Kernel command line: {line}\n{line}\n"));
        assert_eq!(causes(&found), ["option.repeated"]);
    }

    #[test]
    fn values_that_do_not_exist_are_named() {
        assert_eq!(
            causes(&of_text("root=/dev/sda1 amd_iommu=on\n")),
            ["option.unknown-value"]
        );
        assert_eq!(
            causes(&of_text("root=/dev/sda1 iommu.passthrough=pt\n")),
            ["option.unknown-value"]
        );
        assert_eq!(
            causes(&of_text(
                "root=/dev/sda1 amd_iommu=force_enable iommu.strict=on\n"
            )),
            [""; 0]
        );
    }

    #[test]
    fn another_vendor_needs_a_machine() {
        let line = "root=/dev/sda1 intel_iommu=on\n";
        assert_eq!(causes(&of_text(line)), [""; 0]);
        let amd = format!("{line}[  1.0] AMD-Vi: Interrupt remapping enabled\n");
        assert_eq!(causes(&of_text(&amd)), ["option.other-vendor"]);
        let both = format!("{amd}[  1.0] DMAR: Host address width 46\n");
        assert_eq!(causes(&of_text(&both)), [""; 0]);
    }

    #[test]
    fn a_line_of_a_driver_that_reads_its_options_tells_of_no_unit() {
        let amd = "root=/dev/sda1 intel_iommu=on\n[  0.0] DMAR: IOMMU enabled\n";
        assert_eq!(causes(&of_text(amd)), [""; 0]);
        let amd = format!("{amd}[  1.0] AMD-Vi: Interrupt remapping enabled\n");
        assert_eq!(causes(&of_text(&amd)), ["option.other-vendor"]);
        // Sets the mode of Intel's unit, too.
        let intel = "root=/dev/sda1 amd_iommu=fullflush\n[  1.0] DMAR: Host address width 46\n";
        assert_eq!(causes(&of_text(intel)), [""; 0]);
    }
}
