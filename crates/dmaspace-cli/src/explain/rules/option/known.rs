//! Tables of options: those that Linux has, with their values, and names that stand for others.

use crate::explain::facts::Vendor;

/// An option whose values are known.
pub(super) struct Setting {
    pub(super) name: &'static str,
    pub(super) values: Values,
    /// The option is for units of this vendor only.
    pub(super) vendor: Option<Vendor>,
}

/// Values of an option.
pub(super) enum Values {
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

pub(super) const OPTIONS: [Setting; 15] = [
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
pub(super) fn is_bool(value: &str) -> bool {
    let mut letters = value.chars();
    match letters.next() {
        Some('y' | 'Y' | 't' | 'T' | '1' | 'n' | 'N' | 'f' | 'F' | '0') => true,
        Some('o' | 'O') => matches!(letters.next(), Some('n' | 'N' | 'f' | 'F')),
        _ => false,
    }
}

/// Names that Linux does not have, with the option that was meant. The name of a parameter is behind that of its module.
pub(super) const UNKNOWN: [(&str, &str); 21] = [
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
pub(super) const BARE: [(&str, &str); 3] = [
    ("intel_iommu", "intel_iommu=on"),
    ("amd_iommu", "no option: AMD's unit is on without one"),
    ("iommu", "iommu=pt, or intel_iommu=on"),
];

/// Deciding values of the options that switch units off.
pub(super) const OFF: [(&str, Option<Vendor>); 3] = [
    ("iommu", None),
    ("intel_iommu", Some(Vendor::Intel)),
    ("amd_iommu", Some(Vendor::Amd)),
];

/// The word of a list: Linux compares as many letters as the word has.
pub(super) fn known_word(
    known: &'static [(&'static str, &'static str)],
    part: &str,
) -> Option<(&'static str, &'static str)> {
    let name = part.split('=').next().unwrap_or(part);
    let exact = known.iter().find(|(word, _)| *word == name);
    let begins = || known.iter().find(|(word, _)| part.starts_with(word));
    exact.or_else(begins).copied()
}
