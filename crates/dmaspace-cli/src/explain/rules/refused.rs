//! Refusals of a device or a group: no group, no permission for its file, interrupts that are not remapped.

use super::super::facts::{Facts, Line};
use super::super::finding::{Advice, Certainty, Evidence, Finding};

pub(super) fn findings(facts: &Facts, found: &mut Vec<Finding>) {
    let mut all: Vec<Finding> = Vec::new();
    for line in &facts.lines {
        let Some(new) = refused(&line.fact, &line.evidence) else {
            continue;
        };
        // One cause of one device is one finding, and the more certain line counts.
        match all
            .iter_mut()
            .find(|one| one.cause == new.cause && one.devices == new.devices)
        {
            Some(one) => {
                let joined = match new.certainty > one.certainty {
                    true => new.evidence(&one.evidence),
                    false => one.clone().evidence(&new.evidence),
                };
                *one = joined;
            }
            None => all.push(new),
        }
    }
    found.append(&mut all);
}

fn refused(line: &Line, evidence: &Evidence) -> Option<Finding> {
    let who = |device: &Option<String>| device.clone().unwrap_or_else(|| "The device".into());
    let (finding, device) = match line {
        Line::NoGroup { device } => (
            Finding::certain("group.none", "QEMU hw/vfio/container.c, vfio_device_groupid (before 8.2: pci.c, vfio_realize); Linux Documentation/driver-api/vfio.rst")
                .say(format!("{} is in no IOMMU group: no unit translates for it.", who(device)))
                .advise(Advice::text(
                    "Switch the IOMMU on in the firmware's setup; on Intel also intel_iommu=on on the kernel's command \
                     line. Then groups are listed:",
                ))
                .advise(Advice::command(["dmaspace", "devices"])),
            device,
        ),
        Line::GroupFile { group, device } => (
            Finding::certain("group.no-permission", "QEMU hw/vfio/container.c, vfio_get_group; Linux Documentation/driver-api/vfio.rst, \"VFIO Usage Example\"")
                .say(format!(
                    "The monitor's user may not open /dev/vfio/{group}, the file of the group of {}.",
                    device.as_deref().unwrap_or("the device")
                ))
                .advise(Advice::text("Give the file to the user USER of the monitor; libvirt does so itself:"))
                .advise(Advice::command(["chown", "USER", &format!("/dev/vfio/{group}")])),
            device,
        ),
        Line::UnsafeInterrupts { device, named } => {
            let certainty = match named {
                true => Certainty::Certain,
                false => Certainty::Likely,
            };
            let finding = Finding::new("group.unsafe-interrupts", certainty, "Linux drivers/vfio/vfio_iommu_type1.c, vfio_iommu_type1_attach_group")
                .say(format!(
                    "VFIO refuses the group, {}since interrupts are not remapped: a guest could send any interrupt to \
                     the host.",
                    if *named { "" } else { "likely " }
                ))
                .advise(Advice::text(
                    "Switch interrupt remapping on: in the firmware's setup (with the IOMMU, or x2APIC), and without \
                     intremap=off on the kernel's command line. dmesg | grep -i remapping shows it.",
                ))
                .advise(Advice::text(
                    "vfio_iommu_type1.allow_unsafe_interrupts=1 on the kernel's command line only for a guest that is \
                     trusted.",
                ));
            (finding, device)
        }
        _ => return None,
    };
    Some(finding.evidence([evidence]).devices(device.clone()))
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::Certainty;
    use super::super::{causes, of_text};

    #[test]
    fn refusals_before_a_map_have_their_causes() {
        let start = "qemu-system-x86_64: -device vfio-pci,host=01:00.0: vfio 0000:01:00.0: ";
        for (text, cause, certainty) in [
            (
                "no iommu_group found: No such file or directory",
                "group.none",
                Certainty::Certain,
            ),
            (
                "failed to open /dev/vfio/12: Permission denied",
                "group.no-permission",
                Certainty::Certain,
            ),
            (
                "failed to setup container for group 12: Failed to set iommu for container: Operation not permitted",
                "group.unsafe-interrupts",
                Certainty::Likely,
            ),
        ] {
            let found = of_text(&format!("{start}{text}\n"));
            assert_eq!(causes(&found), [cause]);
            assert_eq!(found[0].certainty, certainty);
            assert_eq!(found[0].devices, ["0000:01:00.0"]);
        }
        let kernel = "[ 1.2] vfio_iommu_type1_attach_group: No interrupt remapping support.  Use the module param \
            \"allow_unsafe_interrupts\" to enable VFIO IOMMU support on this platform\n";
        let found = of_text(&format!("{kernel}{kernel}"));
        assert_eq!(causes(&found), ["group.unsafe-interrupts"]);
        assert_eq!(found[0].certainty, Certainty::Certain);
    }
}
