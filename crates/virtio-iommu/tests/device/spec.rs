//! `requirements.txt` beside the code: each requirement names a test, and the tests that it names exist.

use std::fs;
use std::path::Path;

#[test]
fn every_requirement_has_its_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/device");
    let text = fs::read_to_string(root.join("requirements.txt")).unwrap();
    // Tests of each requirement.
    let mut found = Vec::<u32>::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some(test) = line.strip_prefix("    test ") else {
            assert!(line.starts_with("5.13."), "{line}");
            found.push(0);
            continue;
        };
        let (module, name) = test.split_once("::").unwrap();
        let file = root.join(format!("{module}.rs"));
        let source = fs::read_to_string(&file).unwrap_or_else(|_| panic!("no {module}"));
        let function = format!("fn {name}(");
        assert!(source.contains(&function), "there is no test {test}");
        *found.last_mut().unwrap() += 1;
    }
    assert!(
        found.iter().all(|tests| *tests > 0),
        "a requirement without a test"
    );
    // The device's requirements of 5.13.3 to 5.13.6.9.
    assert_eq!(found.len(), 45, "requirements");
}
