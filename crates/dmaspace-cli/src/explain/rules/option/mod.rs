//! The kernel's command line.
//!
//! Sources: Linux 7.2 `Documentation/admin-guide/kernel-parameters.txt`; `drivers/iommu/intel/iommu.c`
//! (`intel_iommu_setup`), `drivers/iommu/amd/init.c` (`parse_amd_iommu_options`), `drivers/iommu/iommu.c`
//! (`iommu_set_def_domain_type`, `iommu_dma_setup`), `arch/x86/kernel/pci-dma.c` (`iommu_setup`),
//! `drivers/iommu/irq_remapping.c` (`setup_irqremap`), `lib/kstrtox.c` (`kstrtobool`), `kernel/params.c` (`parameq`:
//! `-` and `_` are the same in names), `init/main.c` (early options come before the others, whatever their order),
//! `mm/hugetlb.c` (`hugepages_setup`, `hugepagesz_setup`), `Documentation/admin-guide/mm/hugetlbpage.rst`.

mod known;
mod pools;
mod unit;

use std::collections::{BTreeMap, BTreeSet};

use super::super::facts::{Facts, Known, Vendor};
use super::super::finding::{Advice, Certainty, Finding, quoted};
use known::{BARE, OPTIONS, UNKNOWN, Values, is_bool, known_word};

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

/// Settings of a line.
#[derive(Default)]
struct Settings {
    /// Their values in order: a setting may be reached by two options.
    given: BTreeMap<String, Vec<String>>,
    /// Options with a value that they do not have.
    unknown: Vec<(String, String)>,
    /// Options of one vendor's units.
    vendors: Vec<(Vendor, String)>,
}

impl Settings {
    /// Takes an option with its value.
    fn take(&mut self, name: &str, value: &str) {
        let Some(option) = OPTIONS.iter().find(|option| option.name == name) else {
            return;
        };
        let shown = format!("{name}={value}");
        if let Some(vendor) = option.vendor {
            self.vendors.push((vendor, shown.clone()));
        }
        match &option.values {
            Values::Any => self.set(name, shown),
            Values::Bool(setting) => match is_bool(value) {
                true => self.set(setting, shown),
                false => self.unknown.push((name.to_owned(), value.to_owned())),
            },
            Values::List(known) => {
                for part in value.split(',').filter(|part| !part.is_empty()) {
                    match known_word(known, part) {
                        Some((_, "default domain")) => {
                            self.set("default domain", format!("{name}={part}"));
                        }
                        Some((_, setting)) => {
                            self.set(&format!("{name}: {setting}"), format!("{name}={part}"));
                        }
                        None => self.unknown.push((name.to_owned(), part.to_owned())),
                    }
                }
            }
        }
    }

    fn set(&mut self, setting: &str, shown: String) {
        self.given
            .entry(setting.to_owned())
            .or_default()
            .push(shown);
    }
}

fn line(facts: &Facts, one: &Known<String>, found: &mut Vec<Finding>) {
    let mut settings = Settings::default();
    for (name, value) in words(&one.fact) {
        names(one, &name, value, found);
        if let Some(value) = value {
            settings.take(&name, value);
        }
    }
    unit::switched_off(facts, one, &settings.given, found);
    unit::strict(one, &settings.given, found);
    pools::pools(facts, one, found);
    repeated(one, &settings.given, found);
    for (name, value) in &settings.unknown {
        let hint = hint(name, value);
        let finding = Finding::certain("option.unknown-value", "Linux Documentation/admin-guide/kernel-parameters.txt; drivers/iommu/intel/iommu.c, intel_iommu_setup; drivers/iommu/amd/init.c, parse_amd_iommu_options; arch/x86/kernel/pci-dma.c, iommu_setup")
            .evidence([&one.evidence])
            .say(format!("{name}= has no value {value:?}: the kernel ignores it."))
            .advise(Advice::text(format!("{hint}.")));
        found.push(finding);
    }
    unit::other_vendor(facts, one, &settings.vendors, found);
}

/// Settings that are given several times.
fn repeated(
    one: &Known<String>,
    settings: &BTreeMap<String, Vec<String>>,
    found: &mut Vec<Finding>,
) {
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
}

/// Advice for a value that an option does not have.
fn hint(name: &str, value: &str) -> String {
    match (name, value) {
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
            literal(name)
        ),
    }
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

/// A setting as it is typed: with a shell's quotes, unless it has only letters, digits and signs of settings.
fn literal(setting: &str) -> String {
    let harmless = |byte: u8| byte.is_ascii_alphanumeric() || b"=.,:_-/@+".contains(&byte);
    match setting.bytes().all(harmless) {
        true => setting.to_owned(),
        false => quoted(setting),
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
