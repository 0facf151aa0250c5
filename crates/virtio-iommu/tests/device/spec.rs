//! `docs/virtio-iommu.md` beside the code: the tests that it names exist.

use std::fs;
use std::path::Path;

#[test]
fn every_requirement_has_its_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let document = fs::read_to_string(root.join("../../docs/virtio-iommu.md")).unwrap();
    let rows = document.lines().filter(|line| line.starts_with("| 5.13."));
    let mut found = 0;
    for row in rows {
        let cells: Vec<_> = row.split(" | ").collect();
        let tests = cells.last().unwrap();
        let mut named = 0;
        for test in tests.split('`').skip(1).step_by(2) {
            let (module, name) = test.split_once("::").unwrap();
            let file = root.join(format!("tests/device/{module}.rs"));
            let source = fs::read_to_string(&file).unwrap_or_else(|_| panic!("no {module}"));
            assert!(
                source.contains(&format!("fn {name}(")),
                "there is no test {test}"
            );
            named += 1;
        }
        assert!(named > 0 || tests.contains("not yet: "), "no test: {row}");
        found += 1;
    }
    // The device's requirements of 5.13.3 to 5.13.6.9.
    assert_eq!(found, 45, "requirements");
}
