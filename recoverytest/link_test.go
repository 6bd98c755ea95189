package recoverytest

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A link that is cut while a client dials has no connection afterwards: one that is left keeps a goroutine, and synctest fails the test that it
// finds it in.
func TestLink_cutWhileDialling(t *testing.T) {
	env := New(t)
	for range 2000 {
		l := env.newLink()
		begin := make(chan struct{})
		var both sync.WaitGroup
		both.Go(func() { <-begin; l.set(linkCut) })
		both.Go(func() {
			<-begin
			_, err := l.dial(t.Context())
			assert.NoError(t, err)
		})
		close(begin)
		both.Wait()
		require.Empty(t, l.conns)
	}
}
