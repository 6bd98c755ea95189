package recovery

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What the documentation says about the code is compared with the code: tests that it names, links, log lines, rights, figures that follow
// from Config, and whole programs.

// document is one Markdown file.
type document struct {
	path   string
	prose  string   // without fenced blocks
	blocks []string // fenced blocks; the first line is the language
}

func readDocument(t *testing.T, path string) document {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	d := document{path: path}
	var prose, block []string
	fenced := false
	for _, line := range strings.Split(string(text), "\n") {
		fence := strings.HasPrefix(line, "```")
		switch {
		case fence && !fenced:
			fenced, block = true, []string{strings.TrimPrefix(line, "```")}
		case fence:
			fenced = false
			d.blocks = append(d.blocks, strings.Join(block, "\n"))
		case fenced:
			block = append(block, line)
		default:
			prose = append(prose, line)
		}
	}
	require.False(t, fenced, "%s: a fenced block does not end", path)
	d.prose = strings.Join(prose, "\n")
	return d
}

// documents are the Markdown files at the root and in docs.
func documents(t *testing.T) []document {
	t.Helper()
	var all []document
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md"} {
		paths, err := filepath.Glob(pattern)
		require.NoError(t, err)
		for _, path := range paths {
			all = append(all, readDocument(t, path))
		}
	}
	require.Greater(t, len(all), 5)
	return all
}

// A test that is named exists: in this package, or in any other below.
func TestDocs_testsExist(t *testing.T) {
	files := testFuncs(t)
	word := regexp.MustCompile(`(-run |-bench )?\b((?:Test|Fuzz|Example|Benchmark)[A-Z]\w*)(?:/(\w+))?`)
	named := 0
	for _, d := range documents(t) {
		if d.path != "README.md" && !strings.HasPrefix(d.path, "docs/") {
			continue
		}
		for _, m := range word.FindAllStringSubmatch(d.prose, -1) {
			option, name, sub := m[1], m[2], m[3]
			named++
			if option != "" { // a pattern, not a name
				found := slices.ContainsFunc(sortedKeys(files), func(f string) bool { return strings.HasPrefix(f, name) })
				assert.True(t, found, "%s: no test begins with %s", d.path, name)
				continue
			}
			file, ok := files[name]
			if !assert.True(t, ok, "%s: there is no %s", d.path, name) || sub == "" {
				continue
			}
			source, err := os.ReadFile(file)
			require.NoError(t, err)
			assert.True(t, strings.Contains(string(source), strconv.Quote(sub)) || strings.Contains(string(source), strconv.Quote(strings.ReplaceAll(sub, "_", " "))),
				"%s: %s has no case %q", d.path, name, sub)
		}
	}
	assert.Greater(t, named, 100, "the pattern finds them")
}

// testFuncs finds the tests, fuzz targets, examples and benchmarks of all packages, and their files.
func testFuncs(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(".", func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir() && path != "." && (strings.HasPrefix(e.Name(), ".") || e.Name() == "testdata"):
			return filepath.SkipDir
		case e.IsDir() || !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Recv == nil {
				found[f.Name.Name] = path
			}
		}
		return nil
	})
	require.NoError(t, err)
	return found
}

// A relative link leads to a file, and its anchor to a heading.
func TestDocs_links(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	code := regexp.MustCompile("`[^`\n]*`")
	for _, d := range documents(t) {
		for _, m := range link.FindAllStringSubmatch(code.ReplaceAllString(d.prose, ""), -1) {
			target := m[1]
			if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			path, anchor, _ := strings.Cut(target, "#")
			if path = filepath.Join(filepath.Dir(d.path), path); strings.HasPrefix(target, "#") {
				path = d.path
			}
			if _, err := os.Stat(path); !assert.NoError(t, err, "%s links to %s", d.path, target) || anchor == "" {
				continue
			}
			if assert.Equal(t, ".md", filepath.Ext(path), "%s links to %s: only Markdown has anchors", d.path, target) {
				assert.Contains(t, anchors(readDocument(t, path)), anchor, "%s links to %s", d.path, target)
			}
		}
	}
}

// anchors are what GitHub makes of headings.
func anchors(d document) []string {
	var all []string
	seen := map[string]int{}
	for _, line := range strings.Split(d.prose, "\n") {
		level := len(line) - len(strings.TrimLeft(line, "#"))
		if level < 1 || level > 6 || !strings.HasPrefix(line[level:], " ") {
			continue
		}
		anchor := strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
				return unicode.ToLower(r)
			}
			return -1
		}, strings.TrimSpace(line[level:]))
		if n := seen[anchor]; n > 0 {
			all = append(all, fmt.Sprintf("%s-%d", anchor, n))
		} else {
			all = append(all, anchor)
		}
		seen[anchor]++
	}
	return all
}

// Every message that the library can log has its line in docs/operations.md, with its level, and none is there that it can't log.
func TestDocs_everyLogLine(t *testing.T) {
	logged := logMessages(t)
	require.Greater(t, len(logged), 30, "the search finds them")
	row := regexp.MustCompile("(?m)^\\| `(recovery: [^`]+)` \\| (\\w+) \\|")
	told := map[string]string{}
	for _, m := range row.FindAllStringSubmatch(readDocument(t, "docs/operations.md").prose, -1) {
		assert.NotContains(t, told, m[1], "there twice")
		told[m[1]] = m[2]
	}
	for _, message := range sortedKeys(logged) {
		assert.Equal(t, logged[message], told[message], "level of %q in docs/operations.md", message)
	}
	for _, message := range sortedKeys(told) {
		assert.Contains(t, logged, message, "in docs/operations.md, but nobody logs it")
	}
}

// logMessages finds the messages in the package's own source, and their levels.
func logMessages(t *testing.T) map[string]string {
	t.Helper()
	paths, err := filepath.Glob("*.go")
	require.NoError(t, err)
	s := logSearch{t: t, set: token.NewFileSet(), found: map[string]string{}, forwarders: map[string]forwarder{}}
	var files []*ast.File
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(s.set, path, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		files = append(files, file)
	}
	for _, file := range files {
		ast.Inspect(file, s.forwarder)
	}
	for _, file := range files {
		ast.Inspect(file, s.call)
	}
	return s.found
}

type logSearch struct {
	t          *testing.T
	set        *token.FileSet
	found      map[string]string    // message -> level
	forwarders map[string]forwarder // funcs with a parameter msg that goes to a logger
}

type forwarder struct {
	at    int    // of the message, among the arguments
	level string // "" if it is an argument, too
}

// forwarder notes funcs, and closures in variables, that are given a message to log.
func (s *logSearch) forwarder(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.FuncDecl:
		s.note(n.Name.Name, n.Type, n.Body)
	case *ast.AssignStmt:
		for i, value := range n.Rhs {
			if f, ok := value.(*ast.FuncLit); ok && i < len(n.Lhs) {
				if name, ok := n.Lhs[i].(*ast.Ident); ok {
					s.note(name.Name, f.Type, f.Body)
				}
			}
		}
	}
	return true
}

func (s *logSearch) note(name string, typ *ast.FuncType, body *ast.BlockStmt) {
	at := 0
	for _, field := range typ.Params.List {
		for _, param := range field.Names {
			if param.Name == "msg" {
				s.forwarders[name] = forwarder{at: at, level: levelIn(body)}
			}
			at++
		}
	}
}

func (s *logSearch) call(n ast.Node) bool {
	call, ok := n.(*ast.CallExpr)
	if !ok {
		return true
	}
	at, level := -1, ""
	switch f := call.Fun.(type) {
	case *ast.SelectorExpr:
		switch name := f.Sel.Name; name {
		case "Debug", "Info", "Warn", "Error":
			at, level = 0, strings.ToLower(name)
		case "DebugContext", "InfoContext", "WarnContext", "ErrorContext":
			at, level = 1, strings.ToLower(strings.TrimSuffix(name, "Context"))
		case "Log", "LogAttrs":
			at, level = 2, levelIn(call)
		}
	case *ast.Ident:
		if to, ok := s.forwarders[f.Name]; ok {
			if at, level = to.at, to.level; level == "" {
				level = levelIn(call)
			}
		}
	}
	if at < 0 || at >= len(call.Args) { // err.Error() has no arguments
		return true
	}
	if message, ok := constant(call.Args[at]); ok {
		s.found[message] = level
	} else if name, ok := call.Args[at].(*ast.Ident); !ok || name.Name != "msg" {
		s.t.Errorf("%s: the message is not constant: nobody can look it up", s.set.Position(call.Pos()))
	}
	return true
}

// levelIn finds slog.LevelError and the like.
func levelIn(n ast.Node) (level string) {
	ast.Inspect(n, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok && strings.HasPrefix(sel.Sel.Name, "Level") {
			level = strings.ToLower(strings.TrimPrefix(sel.Sel.Name, "Level"))
		}
		return true
	})
	return level
}

// constant is the value of string literals, also of several that are added.
func constant(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		s, err := strconv.Unquote(e.Value)
		return s, err == nil && e.Kind == token.STRING
	case *ast.BinaryExpr:
		left, ok := constant(e.X)
		right, ok2 := constant(e.Y)
		return left + right, ok && ok2 && e.Op == token.ADD
	}
	return "", false
}

// Every counter and every Event is explained to who sets alerts, every setting to who tunes.
func TestDocs_everyField(t *testing.T) {
	operations, readme := readDocument(t, "docs/operations.md"), readDocument(t, "README.md")
	for _, c := range []struct {
		of any
		in document
	}{{Stats{}, operations}, {Events{}, operations}, {Config{}, readme}} {
		typ := reflect.TypeOf(c.of)
		for i := range typ.NumField() {
			assert.Contains(t, c.in.prose, "`"+typ.Field(i).Name+"`", "%s explains %s", c.in.path, typ)
		}
	}
}

// The figures that follow from the defaults are those of the code.
func TestDocs_derived(t *testing.T) {
	cfg := Config{}.withDefaults()
	tm := cfg.timing()
	want := strings.Join([]string{
		"",
		fmt.Sprintf("beat TTL            %v", tm.beatTTL),
		fmt.Sprintf("confirmation        %v", tm.confirm),
		fmt.Sprintf("trust               %v", tm.trust),
		fmt.Sprintf("suspicion's TTL     %v", tm.suspectTTL),
		fmt.Sprintf("claim               %v", tm.claimTTL),
		fmt.Sprintf("one write to Redis  %v", tm.call),
		fmt.Sprintf("renewal of records  %v", tm.renewal),
		fmt.Sprintf("last beat to Enqueue, at most  %v", cfg.OrphanThreshold+cfg.SweepInterval),
	}, "\n")
	assert.Contains(t, readDocument(t, "docs/operations.md").blocks, want)
}

// The rights that people are told to grant are those that the tests run with.
func TestDocs_rights(t *testing.T) {
	user := []string{"ACL", "SETUSER", "worker"}
	whole := slices.Concat(user, []string{"on", ">secret", "resetkeys", "-@all"}, minimalACL)
	lists := slices.Concat(user, listACL)
	assert.Equal(t, [][]string{whole, lists}, rules(readDocument(t, "docs/topologies.md")))
	assert.Equal(t, [][]string{whole}, rules(readDocument(t, "README.md")))
	for _, right := range listACL {
		assert.Regexp(t, `[\x60 ]`+regexp.QuoteMeta(right)+`[\x60 ]`, readDocument(t, "README.md").prose)
	}
}

func rules(d document) (all [][]string) {
	for _, block := range d.blocks {
		if words := strings.Fields(block); len(words) > 1 && words[0] == "ACL" && words[1] == "SETUSER" {
			all = append(all, words)
		}
	}
	return all
}

// Whole programs compile as they stand.
func TestDocs_programs(t *testing.T) {
	programs := 0
	for _, d := range documents(t) {
		for _, block := range d.blocks {
			source, ok := strings.CutPrefix(block, "go\n")
			if !ok || !regexp.MustCompile(`(?m)^package main$`).MatchString(source) {
				continue
			}
			programs++
			file := filepath.Join(t.TempDir(), "main.go")
			require.NoError(t, os.WriteFile(file, []byte(source), 0o600))
			out, err := exec.Command("go", "vet", file).CombinedOutput()
			assert.NoError(t, err, "%s: a program in it: %s", d.path, out)
		}
	}
	assert.GreaterOrEqual(t, programs, 2)
}

func sortedKeys[V any](m map[string]V) []string {
	var keys []string
	for key := range m {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// The model's steps are functions of this package, and the figures of the campaign are figures.
func TestDocs_model(t *testing.T) {
	source := ""
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	for _, name := range files {
		if text, err := os.ReadFile(name); assert.NoError(t, err) && !strings.HasSuffix(name, "_test.go") {
			source += string(text)
		}
	}
	_, steps, ok := strings.Cut(readDocument(t, "docs/model/README.md").prose, "## Steps\n")
	require.True(t, ok)
	steps, _, _ = strings.Cut(steps, "\n## ")
	names := 0
	for _, row := range strings.Split(steps, "\n") {
		columns := strings.Split(row, "|")
		if len(columns) < 4 {
			continue
		}
		for _, name := range regexp.MustCompile("`([A-Za-z.]+)`").FindAllStringSubmatch(columns[2], -1) {
			names++
			bare := name[1][strings.LastIndexByte(name[1], '.')+1:]
			assert.Regexp(t, `(?m)^func (\([^)]*\) )?`+bare+`\(`, source, "%s", name[0])
		}
	}
	assert.Greater(t, names, 30)
	assert.Contains(t, readDocument(t, "docs/verification.md").prose, fmt.Sprintf("each of %d steps with an Enqueuer and %d with a list, and of %d calls",
		len(stepsOfTracking), len(stepsOfLists), len(stepsOfCallbacks)+len(stepsOfFormats)))
	known := strings.Fields("FLUSH FLUSHALL LPUSH MIGRATE PERCENT README RECOVERY_CHAOS SCRIPT SIGCONT SIGKILL SIGSTOP")
	for _, word := range regexp.MustCompile(`\b[A-Z][A-Z_]{3,}\b`).FindAllString(readDocument(t, "docs/verification.md").prose, -1) {
		assert.Contains(t, known, word, "a figure that was never filled in?")
	}
}
