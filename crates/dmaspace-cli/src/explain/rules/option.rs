//! The kernel's command line.
//!
//! Sources: Linux 7.2 `Documentation/admin-guide/kernel-parameters.txt`; `drivers/iommu/intel/iommu.c`
//! (`intel_iommu_setup`), `drivers/iommu/amd/init.c` (`parse_amd_iommu_options`), `drivers/iommu/iommu.c`
//! (`iommu_set_def_domain_type`, `iommu_dma_setup`), `arch/x86/kernel/pci-dma.c` (`iommu_setup`),
//! `drivers/iommu/irq_remapping.c` (`setup_irqremap`), `lib/kstrtox.c` (`kstrtobool`).

use std::collections::BTreeMap;

use super::super::facts::{Facts, Known, Vendor};
use super::super::finding::{Advice, Finding, quoted};

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

pub(super) fn findings(facts: &Facts, found: &mut Vec<Finding>) {
    for one in &facts.command_lines {
        line(facts, one, found);
    }
}

/// Options up to `--`, behind which are those of init.
fn words(line: &str) -> impl Iterator<Item = (String, &str)> {
    let words = line.split_whitespace().take_while(|word| *word != "--");
    words.filter_map(|word| {
        let word = word.trim_matches('"');
        let (name, value) = word.split_once('=')?;
        // Linux takes - for _ in names.
        Some((name.replace('-', "_"), value))
    })
}

fn line(facts: &Facts, one: &Known<String>, found: &mut Vec<Finding>) {
    // Settings with their values in order: a setting may be reached by two options.
    let mut settings: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut unknown = Vec::new();
    let mut vendors = Vec::new();
    for (name, value) in words(&one.fact) {
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
                    let part_name = part.split('=').next().unwrap_or(part);
                    match known.iter().find(|(word, _)| *word == part_name) {
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
            .advise(Advice::text(format!("Keep one: {}, or what was meant.", literal(last))));
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

/// A setting as it is typed: with a shell's quotes, unless it has only letters, digits and signs of settings.
fn literal(setting: &str) -> String {
    let harmless = |byte: u8| byte.is_ascii_alphanumeric() || b"=.,:_-/@+".contains(&byte);
    match setting.bytes().all(harmless) {
        true => setting.to_owned(),
        false => quoted(setting),
    }
}

/// The vendor of the machine's unit, where all of the input agrees.
fn vendor(facts: &Facts) -> Option<(Vendor, Vec<&super::super::finding::Evidence>)> {
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
    for (of, option) in options.iter().filter(|(of, _)| *of != vendor) {
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
        let both = format!("{amd}[  1.0] DMAR: IOMMU enabled\n");
        assert_eq!(causes(&of_text(&both)), [""; 0]);
    }
}
