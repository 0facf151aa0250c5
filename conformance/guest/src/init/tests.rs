//! The tests by name. Each is on the list of at least one machine.

use guest::machines::Machine;

use crate::{platform, software};

/// A test: an error is why it failed.
pub(crate) type Test = fn(&Machine) -> anyhow::Result<()>;

const TESTS: &[(&str, Test)] = &[
    ("the_kernel_is_linux_7_2", platform::kernel),
    ("vfio_and_iommufd_are_there", platform::device_files),
    ("the_unit_is_there_and_has_the_devices", platform::unit),
    ("each_device_has_a_group_of_its_own", platform::groups),
    ("a_device_is_bound_to_vfio_pci", platform::bind),
    ("map_of_4k_pages", software::small_pages),
    (
        "map_of_transparent_huge_pages",
        software::transparent_huge_pages,
    ),
    ("map_of_2m_pages", software::huge_pages),
];

/// The test of this name.
pub(crate) fn find(name: &str) -> Option<Test> {
    let found = TESTS.iter().find(|(known, _)| *known == name);
    found.map(|(_, test)| *test)
}

// The module of the same name holds the tests of the guest; these are of the lists themselves.
#[cfg(test)]
mod lists {
    use guest::machines::MACHINES;

    use super::*;

    #[test]
    fn every_test_of_a_machine_exists_and_every_test_runs_on_a_machine() {
        let listed = || MACHINES.iter().flat_map(|machine| machine.tests(None));
        for name in listed() {
            assert!(find(name).is_some(), "{name}");
        }
        for (name, _) in TESTS {
            assert!(listed().any(|known| known == *name), "{name}");
        }
    }
}
