//! What the sources of the workspace have: public items, tests, benches.
//!
//! Every target is read from its root file along its `mod` declarations, so that a file which
//! is not compiled does not count. Items and tests inside macros are found by their tokens: a
//! `proptest!` block holds `#[test] fn name`, a `macro_rules!` suite holds it as a template.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use cargo_metadata::{Metadata, Package, TargetKind};
use syn::{Attribute, ImplItem, Item as Syntax, TraitItem, UseTree, Visibility};

use super::tokens::{TestScan, all_idents, public_names};

/// All members.
pub(crate) struct Workspace {
    /// One per package.
    pub(crate) crates: Vec<Crate>,
    /// Names of rows and of formats that `cargo xtask bench-tables` measures, and other words that
    /// stand in quotation marks there.
    pub(crate) measured: BTreeSet<String>,
}

/// One package.
#[derive(Default)]
pub(crate) struct Crate {
    /// What it may be called in a path: library name, package name, directory name.
    pub(crate) names: BTreeSet<String>,
    /// Public items.
    pub(crate) items: Vec<Item>,
    /// Tests that the test command compiles.
    pub(crate) tests: Vec<Test>,
    /// Public re-exports.
    pub(crate) exports: Vec<Export>,
    /// Bench targets.
    pub(crate) benches: BTreeSet<String>,
    /// Uses of macros, which may stand for tests: see [`Crate::expand`].
    calls: Vec<Call>,
    /// Macros of the crate that define tests whose names they are given.
    templates: BTreeSet<String>,
    /// Macros that hold tests, by name: the tests, and whether they are ignored.
    suites: BTreeMap<String, Vec<(String, bool)>>,
}

/// A public item, or a public part of one.
pub(crate) struct Item {
    /// The modules in which it is written.
    pub(crate) modules: Vec<String>,
    /// The type or trait that it belongs to, if any.
    pub(crate) owner: Option<String>,
    /// Its name.
    pub(crate) name: String,
}

/// A test.
#[derive(Clone)]
pub(crate) struct Test {
    /// The file below the package's directory.
    pub(crate) file: PathBuf,
    /// The modules in which it is written.
    pub(crate) modules: Vec<String>,
    /// Its name.
    pub(crate) name: String,
    /// Marked `#[ignore]`: it does not run.
    pub(crate) ignored: bool,
}

/// `pub use path as name`, or `pub use path::*` without a name.
pub(crate) struct Export {
    /// The modules in which it is written.
    pub(crate) modules: Vec<String>,
    /// What is exported.
    pub(crate) path: Vec<String>,
    /// Its name here; none stands for everything in it.
    pub(crate) name: Option<String>,
}

struct Call {
    file: PathBuf,
    modules: Vec<String>,
    name: String,
    idents: BTreeSet<String>,
}

impl Workspace {
    /// Reads the sources of every member.
    pub(crate) fn read(metadata: &Metadata) -> anyhow::Result<Self> {
        let packages = metadata.workspace_packages();
        let crates = packages
            .into_iter()
            .map(read_crate)
            .collect::<Result<_, _>>()?;
        let peers = metadata.workspace_root.join("peers/src");
        let mut measured = BTreeSet::new();
        for file in ["rows.rs", "field.rs"] {
            let text = fs::read_to_string(peers.join(file)).context("peers' rows")?;
            measured.extend(text.split('"').skip(1).step_by(2).map(str::to_owned));
        }
        Ok(Self { crates, measured })
    }

    /// The member of this name.
    pub(crate) fn find(&self, name: &str) -> Option<&Crate> {
        self.crates
            .iter()
            .find(|member| member.names.contains(name))
    }
}

fn read_crate(package: &Package) -> anyhow::Result<Crate> {
    let directory = package
        .manifest_path
        .parent()
        .context("a manifest without directory")?;
    let mut found = Crate::default();
    found.names.insert(package.name.replace('-', "_"));
    found.names.extend(directory.file_name().map(str::to_owned));
    for target in &package.targets {
        let root = target.src_path.as_std_path();
        if target.is_kind(TargetKind::Bench) {
            found.benches.insert(target.name.clone());
            continue;
        }
        if target.is_kind(TargetKind::CustomBuild) {
            continue;
        }
        let public = !target.is_kind(TargetKind::Test) && !target.is_kind(TargetKind::Example);
        if target.is_kind(TargetKind::Lib) {
            found.names.insert(target.name.clone());
        }
        let mut reader = Reader {
            directory: directory.as_std_path(),
            found: &mut found,
        };
        reader.file(
            root,
            root.parent().context("a root file without directory")?,
            &[],
            public,
        )?;
    }
    found.expand();
    Ok(found)
}

impl Crate {
    /// True when a macro is used in `file` with this word among its arguments.
    pub(crate) fn macro_word(&self, file: &Path, word: &str) -> bool {
        let mut calls = self.calls.iter();
        calls.any(|call| call.file == file && call.idents.contains(word))
    }

    /// A macro that defines a test for each name that it is given defines these; a macro that holds
    /// tests defines them wherever it is used.
    fn expand(&mut self) {
        for call in &self.calls {
            let mut names: Vec<(String, bool)> = Vec::new();
            if self.templates.contains(&call.name) {
                names.extend(call.idents.iter().map(|name| (name.clone(), false)));
            }
            names.extend(self.suites.get(&call.name).into_iter().flatten().cloned());
            self.tests
                .extend(names.into_iter().map(|(name, ignored)| Test {
                    file: call.file.clone(),
                    modules: call.modules.clone(),
                    name,
                    ignored,
                }));
        }
    }

    /// Reads one source text as if it were `file`, for tests of the look-up.
    #[cfg(test)]
    pub(crate) fn from_text(name: &str, file: &str, text: &str) -> Self {
        let mut found = Self::default();
        found.names.insert(name.to_owned());
        let mut reader = Reader {
            directory: Path::new(""),
            found: &mut found,
        };
        let parsed = syn::parse_file(text).unwrap();
        let place = Place {
            file: Path::new(file),
            children: PathBuf::new(),
            public: true,
        };
        reader.items(&parsed.items, &place, &[]).unwrap();
        found.expand();
        found
    }
}

/// Where the reader is.
struct Place<'a> {
    file: &'a Path,
    /// The directory in which `mod name;` looks for its file.
    children: PathBuf,
    /// False inside tests, whose items nobody outside can use.
    public: bool,
}

struct Reader<'a> {
    directory: &'a Path,
    found: &'a mut Crate,
}

impl Reader<'_> {
    fn file(
        &mut self,
        path: &Path,
        children: &Path,
        modules: &[String],
        public: bool,
    ) -> anyhow::Result<()> {
        let shown = || path.display().to_string();
        let text = fs::read_to_string(path).with_context(shown)?;
        let parsed = syn::parse_file(&text).with_context(shown)?;
        let file = path.strip_prefix(self.directory).unwrap_or(path);
        let place = Place {
            file,
            children: children.to_owned(),
            public,
        };
        self.items(&parsed.items, &place, modules)
    }

    fn items(&mut self, items: &[Syntax], at: &Place, modules: &[String]) -> anyhow::Result<()> {
        for item in items {
            match item {
                Syntax::Mod(module) => self.module(module, at, modules)?,
                Syntax::Fn(function) if has_attribute(&function.attrs, "test") => {
                    self.found.tests.push(Test {
                        file: at.file.to_owned(),
                        modules: modules.to_vec(),
                        name: function.sig.ident.to_string(),
                        ignored: has_attribute(&function.attrs, "ignore"),
                    });
                }
                Syntax::Macro(call) => self.call(call, at, modules),
                _ if at.public => self.public_item(item, modules),
                _ => {}
            }
        }
        Ok(())
    }

    fn module(
        &mut self,
        module: &syn::ItemMod,
        at: &Place,
        modules: &[String],
    ) -> anyhow::Result<()> {
        let name = module.ident.to_string();
        let inner = [modules, std::slice::from_ref(&name)].concat();
        let public = at.public && !only_in_tests(&module.attrs);
        let children = at.children.join(&name);
        if let Some((_, items)) = &module.content {
            let place = Place {
                file: at.file,
                children,
                public,
            };
            return self.items(items, &place, &inner);
        }
        let beside = self.directory.join(at.file);
        let beside = beside.parent().unwrap_or(self.directory);
        if let Some(path) = path_attribute(&module.attrs) {
            let path = beside.join(path);
            let children = path.parent().unwrap_or(beside).to_owned();
            return self.file(&path, &children, &inner, public);
        }
        let flat = children.with_extension("rs");
        let path = if flat.exists() {
            flat
        } else {
            children.join("mod.rs")
        };
        self.file(&path, &children, &inner, public)
            .with_context(|| format!("module `{name}` of {}", at.file.display()))
    }

    fn public_item(&mut self, item: &Syntax, modules: &[String]) {
        let mut add = |owner: Option<&str>, name: String| {
            self.found.items.push(Item {
                modules: modules.to_vec(),
                owner: owner.map(str::to_owned),
                name,
            });
        };
        match item {
            Syntax::Fn(x) if is_public(&x.vis) => add(None, x.sig.ident.to_string()),
            Syntax::Const(x) if is_public(&x.vis) => add(None, x.ident.to_string()),
            Syntax::Static(x) if is_public(&x.vis) => add(None, x.ident.to_string()),
            Syntax::Type(x) if is_public(&x.vis) => add(None, x.ident.to_string()),
            Syntax::Union(x) if is_public(&x.vis) => add(None, x.ident.to_string()),
            Syntax::Struct(x) if is_public(&x.vis) => {
                let owner = x.ident.to_string();
                for field in x.fields.iter().filter(|field| is_public(&field.vis)) {
                    if let Some(name) = &field.ident {
                        add(Some(&owner), name.to_string());
                    }
                }
                add(None, owner);
            }
            Syntax::Enum(x) if is_public(&x.vis) => {
                let owner = x.ident.to_string();
                for variant in &x.variants {
                    add(Some(&owner), variant.ident.to_string());
                }
                add(None, owner);
            }
            Syntax::Trait(x) if is_public(&x.vis) => {
                let owner = x.ident.to_string();
                for item in &x.items {
                    match item {
                        TraitItem::Fn(f) => add(Some(&owner), f.sig.ident.to_string()),
                        TraitItem::Const(c) => add(Some(&owner), c.ident.to_string()),
                        TraitItem::Type(t) => add(Some(&owner), t.ident.to_string()),
                        _ => {}
                    }
                }
                add(None, owner);
            }
            Syntax::Impl(x) => {
                let Some(owner) = type_name(&x.self_ty) else {
                    return;
                };
                // What a trait asks for is as public as the trait.
                let open = |vis: &Visibility| x.trait_.is_some() || is_public(vis);
                for item in &x.items {
                    match item {
                        ImplItem::Fn(f) if open(&f.vis) => {
                            add(Some(&owner), f.sig.ident.to_string())
                        }
                        ImplItem::Const(c) if open(&c.vis) => {
                            add(Some(&owner), c.ident.to_string())
                        }
                        _ => {}
                    }
                }
            }
            Syntax::Use(x) if is_public(&x.vis) => self.export(&x.tree, modules, &[]),
            _ => {}
        }
    }

    fn export(&mut self, tree: &UseTree, modules: &[String], path: &[String]) {
        let mut add = |path: Vec<String>, name: Option<String>| {
            self.found.exports.push(Export {
                modules: modules.to_vec(),
                path,
                name,
            });
        };
        match tree {
            UseTree::Path(step) => {
                let path = [path, &[step.ident.to_string()]].concat();
                self.export(&step.tree, modules, &path);
            }
            UseTree::Name(leaf) => {
                let name = leaf.ident.to_string();
                add([path, std::slice::from_ref(&name)].concat(), Some(name));
            }
            UseTree::Rename(leaf) => {
                let path = [path, &[leaf.ident.to_string()]].concat();
                add(path, Some(leaf.rename.to_string()));
            }
            UseTree::Glob(_) => add(path.to_vec(), None),
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.export(tree, modules, path);
                }
            }
        }
    }

    fn call(&mut self, item: &syn::ItemMacro, at: &Place, modules: &[String]) {
        let tokens = item.mac.tokens.clone();
        let mut tests = TestScan::default();
        tests.scan(tokens.clone());
        self.found
            .tests
            .extend(tests.names.iter().map(|(name, ignored)| Test {
                file: at.file.to_owned(),
                modules: modules.to_vec(),
                name: name.clone(),
                ignored: *ignored,
            }));
        // `macro_rules! name` has an ident; a use of a macro has none.
        if let Some(name) = &item.ident {
            if tests.template {
                self.found.templates.insert(name.to_string());
            }
            self.found.suites.insert(name.to_string(), tests.names);
            if at.public && has_attribute(&item.attrs, "macro_export") {
                let name = name.to_string();
                self.found.items.push(Item {
                    modules: Vec::new(),
                    owner: None,
                    name,
                });
            }
            return;
        }
        if at.public {
            let mut names = Vec::new();
            public_names(tokens.clone(), &mut names);
            self.found.items.extend(names.into_iter().map(|name| Item {
                modules: modules.to_vec(),
                owner: None,
                name,
            }));
        }
        let mut idents = BTreeSet::new();
        all_idents(tokens, &mut idents);
        let name = item.mac.path.segments.last();
        self.found.calls.push(Call {
            file: at.file.to_owned(),
            modules: modules.to_vec(),
            name: name
                .map(|segment| segment.ident.to_string())
                .unwrap_or_default(),
            idents,
        });
    }
}

fn is_public(vis: &Visibility) -> bool {
    matches!(vis, Visibility::Public(_))
}

/// True for `#[name]` and `#[some::name]`, with or without arguments.
fn has_attribute(attributes: &[Attribute], name: &str) -> bool {
    let last = |attribute: &Attribute| {
        let last = attribute.path().segments.last();
        last.is_some_and(|segment| segment.ident == name)
    };
    attributes.iter().any(last)
}

/// True for `#[cfg(test)]` and for `#[cfg(all(test, …))]`.
fn only_in_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let Ok(list) = attribute.meta.require_list() else {
            return false;
        };
        let mut words = BTreeSet::new();
        all_idents(list.tokens.clone(), &mut words);
        attribute.path().is_ident("cfg")
            && words.contains("test")
            && !words.contains("not")
            && !words.contains("any")
    })
}

/// The file in `#[path = "file.rs"]`.
fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    let attribute = attributes.iter().find(|a| a.path().is_ident("path"))?;
    let value = &attribute.meta.require_name_value().ok()?.value;
    match value {
        syn::Expr::Lit(syn::ExprLit {
            lit: syn::Lit::Str(path),
            ..
        }) => Some(path.value()),
        _ => None,
    }
}

fn type_name(ty: &syn::Type) -> Option<String> {
    match ty {
        syn::Type::Path(path) => path.path.segments.last().map(|s| s.ident.to_string()),
        syn::Type::Reference(reference) => type_name(&reference.elem),
        _ => None,
    }
}
