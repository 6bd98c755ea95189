package recovery

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A test that sleeps for real is slow, and fails on a busy machine. Those in a bubble sleep in fake time; outside of one only these may.
var mayTakeTime = map[string]string{
	"Decode": "in a bubble", "ProcessHook": "in a bubble", "TestSweeper_batchEnqueuerThatMisbehaves": "in a bubble", "crashRun": "in a bubble",
	"property": "in a bubble", "handler": "in a bubble", "harm": "in a bubble",
	"enqueuer": "in a bubble", "play": "in a bubble", "do": "in a bubble", "empty": "in a bubble", "settleOps": "in a bubble", "quieten": "in a bubble", "later": "in a bubble",
	"runChild":                            "ends a process whose test has died",
	"answers":                             "between two looks",
	"childSweeper":                        "between two looks",
	"childFetcher":                        "is the work",
	"TestFetch_killedAtRandom":            "until the kill, at random",
	"TestListQueue_sweeperKilledAtRandom": "until the kill, at random",
	"TestChaos":                           "until the kill, at random",
	"TestRedisAway":                       "is what is observed: for so long nothing may happen",
}

func TestSleeps_areInBubbles(t *testing.T) {
	unused := map[string]bool{}
	for name := range mayTakeTime {
		unused[name] = true
	}
	set := token.NewFileSet()
	require.NoError(t, filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(set, path, nil, 0)
		require.NoError(t, err)
		for _, decl := range file.Decls {
			fn, ok := decl.(*ast.FuncDecl)
			if !ok || fn.Body == nil {
				continue
			}
			ast.Inspect(fn.Body, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				switch callee(call) {
				case "inBubble", "synctest.Test":
					return false
				case "time.Sleep":
					assert.NotEmpty(t, mayTakeTime[fn.Name.Name], "%s sleeps outside of a bubble", set.Position(call.Pos()))
					delete(unused, fn.Name.Name)
				}
				return true
			})
		}
		return nil
	}))
	assert.Empty(t, unused, "they do not sleep")
}

// callee is what a call names: f, or p.f.
func callee(call *ast.CallExpr) string {
	switch f := call.Fun.(type) {
	case *ast.Ident:
		return f.Name
	case *ast.SelectorExpr:
		if from, ok := f.X.(*ast.Ident); ok {
			return from.Name + "." + f.Sel.Name
		}
	}
	return ""
}
