//! Names of PCI devices, from the system's list.
//!
//! The format is described at the head of the list itself (<https://pci-ids.ucw.cz>): a line of a vendor
//! begins with its number, those of its devices follow with one tab before them, subsystems have two.

use hostmem::read_at_most;

/// Where distributions install the list.
const LISTS: [&str; 2] = ["/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids"];

/// The longest list that is read; that of 2026 has 1.6 MB.
const MOST: u64 = 64 << 20;

/// The list; without one no device has a name.
#[derive(Debug, Default)]
pub(crate) struct Names(pub(super) String);

impl Names {
    pub(crate) fn open() -> Self {
        let list = LISTS.iter().find_map(|path| read_at_most(path, MOST).ok());
        Self(String::from_utf8_lossy(&list.unwrap_or_default()).into_owned())
    }

    /// The name of `8086:10d3`; of a device that the list lacks, its vendor's and the number.
    pub(crate) fn of(&self, id: &str) -> Option<String> {
        let (vendor, device) = id.split_once(':')?;
        let mut lines = self.0.lines().filter(|line| !line.starts_with('#'));
        let vendor = lines.find_map(|line| named(line, vendor))?;
        let devices = lines.take_while(|line| line.starts_with('\t'));
        let name = devices
            .filter_map(|line| line.strip_prefix('\t'))
            .find_map(|line| named(line, device));
        Some(format!("{vendor} {}", name.unwrap_or(device)))
    }
}

/// `10d3  82574L Gigabit Network Connection`
fn named<'a>(line: &'a str, number: &str) -> Option<&'a str> {
    let name = line.strip_prefix(number)?.strip_prefix("  ")?.trim();
    (number.len() == 4 && !name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "\
# 8086  A comment
1af4  Red Hat, Inc.
\t1000  Virtio network device
\t\t1af4 0001  Virtio of a subsystem
8086  Intel Corporation
\t0001  First
# between
\t10d3  82574L Gigabit Network Connection
C 02  Network controller
\t00  Ethernet controller
";

    #[test]
    fn a_device_is_named_by_the_list_and_an_unknown_one_by_its_vendor() {
        let names = Names(LIST.into());
        for (id, name) in [
            (
                "8086:10d3",
                Some("Intel Corporation 82574L Gigabit Network Connection"),
            ),
            ("1af4:1000", Some("Red Hat, Inc. Virtio network device")),
            // Neither another vendor's device, nor a subsystem.
            ("1af4:10d3", Some("Red Hat, Inc. 10d3")),
            ("1af4:1af4", Some("Red Hat, Inc. 1af4")),
            ("10d3:0001", None),
            ("8086", None),
            (":", None),
        ] {
            assert_eq!(names.of(id).as_deref(), name, "{id}");
        }
        assert_eq!(Names::default().of("8086:10d3"), None);
    }
}
