use super::{
    build::{lost, normal},
    *,
};
use crate::patch::Patch;

#[test]
fn every_line_of_ours_is_an_option_or_a_comment() {
    for kernel in KERNELS {
        for line in kernel.options.lines().filter(|line| !line.is_empty()) {
            // An option that is off has no line in the result, so it could not be looked for.
            let on = line.contains('=') && !line.ends_with("=n");
            let option = line.starts_with("CONFIG_") && on;
            assert!(option || line.starts_with("# "), "{line}");
        }
    }
}

#[test]
fn paths_lead_where_they_lead() {
    assert_eq!(normal("./a//b/../c.h"), Path::new("a/c.h"));
    assert_eq!(
        normal("drivers/iommu/generic_pt/fmt/../x.h"),
        Path::new("drivers/iommu/generic_pt/x.h")
    );
}

#[test]
fn options_that_did_not_survive_are_named() {
    let config = "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=8\nCONFIG_LONGER=y\n";
    assert!(lost("# a comment\n\nCONFIG_A=y\nCONFIG_C=8\n", config).is_empty());
    let wanted = "CONFIG_B=y\nCONFIG_C=4\nCONFIG_LONG=y\n";
    assert_eq!(lost(wanted, config), wanted.lines().collect::<Vec<_>>());
}

#[test]
fn a_kernel_of_other_options_is_not_kept() {
    let work = tempfile::tempdir().unwrap();
    let work = work.path();
    fs::create_dir_all(UML.directory(work)).unwrap();
    assert_eq!(UML.kept(work), None);
    fs::write(UML.image(work), "").unwrap();
    assert_eq!(UML.kept(work), None);
    fs::write(UML.options_file(work), "CONFIG_OTHER=y\n").unwrap();
    assert_eq!(UML.kept(work), None);
    // A file of before the source had a name in it.
    fs::write(UML.options_file(work), UML.options).unwrap();
    assert_eq!(UML.kept(work), None);
    kept(UML, work);
    assert_eq!(UML.kept(work), Some(UML.image(work)));
}

/// A kernel that was built from the options of today.
fn kept(kernel: Kernel, work: &Path) {
    fs::create_dir_all(kernel.modules(work)).unwrap();
    fs::write(kernel.image(work), "").unwrap();
    fs::write(kernel.options_file(work), kernel.built_from()).unwrap();
}

#[test]
fn lines_of_ours_in_each_kernel_of_a_kind_are_part_of_what_it_is_built_from() {
    assert!(TESTS.built_from().contains(UNMAPS));
    assert!(TESTS.built_from().contains(EXACT_COUNTS));
    assert!(RISCV.built_from().contains(LACKING));
    assert!(!GUEST.built_from().contains(UNMAPS));
    assert!(!ARM.built_from().contains(LACKING));
}

#[test]
fn what_is_not_what_the_sources_say_is_not_booted() {
    let (root, work) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (root, work) = (root.path(), work.path());
    let refusal = |tables| format!("{:#}", GUEST.current(tables, root, work).unwrap_err());
    assert_eq!(
        refusal(Tables::Stock),
        "there is no such kernel: `cargo xtask linux --kernel guest`"
    );
    kept(GUEST, work);
    let stock = GUEST.current(Tables::Stock, root, work).unwrap();
    assert_eq!(stock, GUEST.image(work));
    // It is there, but nothing says of what.
    let linked = GUEST.image_with(Tables::Iopt, work);
    fs::write(&linked, "").unwrap();
    GUEST.linked(Tables::Iopt, &[], work).unwrap_err();
    assert_eq!(GUEST.linked(Tables::Stock, &[], work).unwrap(), stock);
    let said = refusal(Tables::Iopt);
    assert!(
        said.contains("`cargo xtask linux --kernel guest` comes first: there is no record"),
        "{said}"
    );
    let file = root.join("lib.rs");
    fs::write(&file, "leaves are read-only").unwrap();
    let record = inputs::record(root, &["lib.rs".into()]).unwrap();
    inputs::keep(&record, &linked).unwrap();
    for tables in [Tables::Iopt, Tables::One] {
        assert_eq!(GUEST.current(tables, root, work).unwrap(), linked);
    }
    fs::write(&file, "leaves are writable").unwrap();
    for tables in [Tables::Iopt, Tables::One] {
        let said = refusal(tables);
        assert!(
            said.ends_with("was built before lib.rs has changed"),
            "{said}"
        );
    }
    // With its own tables it is what it was.
    GUEST.current(Tables::Stock, root, work).unwrap();
    let module = GUEST.modules(work).join(MODULE);
    inputs::keep(&record, &module).unwrap();
    let said = format!("{:#}", GUEST.current_module(root, work).unwrap_err());
    assert!(
        said.ends_with("was built before lib.rs has changed"),
        "{said}"
    );
    fs::write(&file, "leaves are read-only").unwrap();
    assert_eq!(GUEST.current_module(root, work).unwrap(), module);
    // With other options neither is of this kernel.
    fs::write(GUEST.options_file(work), "CONFIG_OTHER=y\n").unwrap();
    for patches in [&[][..], &[Patch::Stock]] {
        let refused = GUEST.linked(Tables::Iopt, patches, work).unwrap_err();
        assert_eq!(refused.to_string(), GUEST.missing());
    }
}
