package recovery

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	key16 = bytes.Repeat([]byte{1}, 16)
	key24 = bytes.Repeat([]byte{2}, 24)
	key32 = bytes.Repeat([]byte{3}, 32)
)

func mustSeal(t testing.TB, c Codec, plain, context string) []byte {
	t.Helper()
	sealed, err := c.Seal([]byte(plain), []byte(context))
	require.NoError(t, err)
	return sealed
}

func TestAESGCM_roundTrip(t *testing.T) {
	for _, key := range [][]byte{key16, key24, key32} {
		c := AESGCM(key)
		for _, plain := range []string{"", "x", "secret payload", string(make([]byte, 1<<20))} {
			for _, context := range []string{"", "host:123-abc/17"} {
				sealed := mustSeal(t, c, plain, context)
				assert.Len(t, sealed, sealOverhead+len(plain))
				if len(plain) > 1 {
					assert.False(t, bytes.Contains(sealed, []byte(plain)))
				}
				got, err := c.Open(sealed, []byte(context))
				require.NoError(t, err)
				assert.True(t, plain == string(got))
			}
		}
		assert.NotEqual(t, mustSeal(t, c, "same", ""), mustSeal(t, c, "same", ""), "nonces are random")
	}
	c := AESGCM(key32)
	sealed, err := c.Seal(nil, nil)
	require.NoError(t, err)
	got, err := c.Open(sealed, nil)
	require.NoError(t, err)
	assert.Empty(t, got)
}

// The format must not change: programs of different versions share a Redis.
func TestAESGCM_format(t *testing.T) {
	sealed, err := hex.DecodeString("01" + "174fdcc3" + "99c937b2923fb5e053728bab" + "c53946fd5b" + "9045305d97b7f4da7ac2fc78f17301f5")
	require.NoError(t, err)
	got, err := AESGCM(key32).Open(sealed, []byte("lease"))
	require.NoError(t, err)
	assert.Equal(t, "plain", string(got))
	assert.Equal(t, sealed[:sealHeader], mustSeal(t, AESGCM(key32), "plain", "lease")[:sealHeader])

	block, err := aes.NewCipher(key32)
	require.NoError(t, err)
	gcm, err := cipher.NewGCM(block)
	require.NoError(t, err)
	fresh := mustSeal(t, AESGCM(key32), "plain", "lease")
	got, err = gcm.Open(nil, fresh[5:17], fresh[17:], []byte("lease"))
	require.NoError(t, err)
	assert.Equal(t, "plain", string(got))
}

func TestAESGCM_records(t *testing.T) {
	c := AESGCM(key32)
	job := Job{ID: "job", Queue: "q", Payload: []byte("secret payload"), Headers: map[string]string{"user": "ann in clear"}}
	raw, err := encodeRecord(&job, "w/1", c, false)
	require.NoError(t, err)
	assert.NotContains(t, string(raw), "secret")
	assert.NotContains(t, string(raw), "ann")
	got, err := decodeRecord(raw, "w/1", c)
	require.NoError(t, err)
	assert.Equal(t, job.Payload, got.Payload)
	assert.Equal(t, job.Headers, got.Headers)
	got, err = decodeRecord(raw, "w/2", c)
	assert.ErrorContains(t, err, `for another context than "w/2"`)
	assert.Equal(t, "job", got.ID, "a record that can't be opened can still be named")
	assert.Empty(t, got.Payload)
}

func TestAESGCM_rotation(t *testing.T) {
	before, first, second, after := AESGCM(key16), AESGCM(key16, key32), AESGCM(key32, key16), AESGCM(key32)
	opens := func(c Codec, sealed []byte) bool {
		plain, err := c.Open(sealed, []byte("lease"))
		return err == nil && string(plain) == "plain"
	}
	for name, test := range map[string]struct {
		sealer  Codec
		openers []Codec
		refuse  Codec
	}{
		"before": {before, []Codec{before, first, second}, after},
		"first":  {first, []Codec{before, first, second}, after},
		"second": {second, []Codec{first, second, after}, before},
		"after":  {after, []Codec{first, second, after}, before},
	} {
		sealed := mustSeal(t, test.sealer, "plain", "lease")
		for i, c := range test.openers {
			assert.True(t, opens(c, sealed), "%s, %d", name, i)
		}
		assert.False(t, opens(test.refuse, sealed), name)
	}
}

// Keys that share an id are both tried.
func TestAESGCM_sameID(t *testing.T) {
	c := AESGCM(key16, key32).(*aesGCM)
	c.keys[1].id = c.keys[0].id
	sealed := mustSeal(t, c, "plain", "lease")
	c.keys[0], c.keys[1] = c.keys[1], c.keys[0]
	got, err := c.Open(sealed, []byte("lease"))
	require.NoError(t, err)
	assert.Equal(t, "plain", string(got))
	_, err = c.Open(sealed, []byte("other"))
	assert.ErrorContains(t, err, "does not open under key")
}

func TestAESGCM_wrongContext(t *testing.T) {
	c := AESGCM(key32)
	sealed := mustSeal(t, c, "plain", "w/1")
	for _, context := range []string{"", "w/", "w/2", "w/11", "w/1 payload"} {
		plain, err := c.Open(sealed, []byte(context))
		assert.Nil(t, plain)
		assert.ErrorContains(t, err, fmt.Sprintf("or sealed for another context than %q", context))
	}
}

func TestAESGCM_tampered(t *testing.T) {
	c := AESGCM(key32, key16)
	sealed := mustSeal(t, c, "plain", "lease")
	for i := range sealed {
		for bit := range 8 {
			bad := bytes.Clone(sealed)
			bad[i] ^= 1 << bit
			plain, err := c.Open(bad, []byte("lease"))
			require.Error(t, err, "byte %d, bit %d", i, bit)
			assert.Nil(t, plain)
			switch {
			case i == 0:
				assert.ErrorContains(t, err, "this program knows 1")
			case i < sealHeader:
				assert.ErrorContains(t, err, "not configured")
			default:
				assert.ErrorContains(t, err, "changed or cut short")
			}
		}
	}
	_, err := c.Open(append(sealed, 0), []byte("lease"))
	assert.ErrorContains(t, err, "changed or cut short")
}

func TestAESGCM_truncated(t *testing.T) {
	c := AESGCM(key32)
	sealed := mustSeal(t, c, "plain", "lease")
	for n := range sealed {
		plain, err := c.Open(sealed[:n], []byte("lease"))
		assert.ErrorContains(t, err, "cut short")
		assert.Nil(t, plain)
	}
	_, err := c.Open(nil, nil)
	assert.EqualError(t, err, "AESGCM: cut short: 0 bytes, at least 33")
}

func TestAESGCM_unknownKey(t *testing.T) {
	sealed := mustSeal(t, AESGCM(key32), "plain", "lease")
	_, err := AESGCM(key16, key24).Open(sealed, []byte("lease"))
	assert.EqualError(t, err, fmt.Sprintf("AESGCM: sealed under key %x, which is not configured", sealed[1:sealHeader]))
}

func TestAESGCM_badKeys(t *testing.T) {
	for name, test := range map[string]struct {
		keys [][]byte
		want []string
	}{
		"none": {nil, []string{"Codec: AESGCM has no key, needs at least 1"}},
		"nil":  {[][]byte{nil}, []string{"Codec: AESGCM key 1 has 0 bytes, must have 16, 24 or 32"}},
		"all at once": {[][]byte{key16, []byte("short"), key32, key16, make([]byte, 33)}, []string{
			"Codec: AESGCM key 2 has 5 bytes, must have 16, 24 or 32",
			"Codec: AESGCM key 4 is the same as key 1",
			"Codec: AESGCM key 5 has 33 bytes, must have 16, 24 or 32",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			c := AESGCM(test.keys...)
			err := c.(interface{ validate() error }).validate()
			var texts []string
			for _, e := range err.(interface{ Unwrap() []error }).Unwrap() {
				texts = append(texts, e.Error())
			}
			assert.Equal(t, test.want, texts)
			assert.NotContains(t, err.Error(), "short", "keys are not printed")
			_, serr := c.Seal([]byte("plain"), nil)
			_, oerr := c.Open([]byte("sealed"), nil)
			assert.True(t, errors.Is(serr, err) && errors.Is(oerr, err), "%v, %v", serr, oerr)
		})
	}
	assert.NoError(t, AESGCM(key16, key24, key32).(interface{ validate() error }).validate())
}

func TestAESGCM_keepsNoReference(t *testing.T) {
	key := bytes.Clone(key32)
	keys := [][]byte{key}
	c := AESGCM(keys...)
	clear(key)
	keys[0] = nil
	got, err := AESGCM(key32).Open(mustSeal(t, c, "plain", "lease"), []byte("lease"))
	require.NoError(t, err)
	assert.Equal(t, "plain", string(got))

	readable := bytes.Repeat([]byte("K"), 32)
	for _, format := range []string{"%v", "%+v", "%#v", "%s", "%x"} {
		text := fmt.Sprintf(format, AESGCM(readable))
		assert.NotContains(t, text, "KKKK", format)
		assert.NotContains(t, text, "4b4b", format)
		assert.NotContains(t, text, "75 75", format)
		assert.NotContains(t, text, "0x4b, 0x4b", format)
	}
}

func TestAESGCM_concurrent(t *testing.T) {
	c := AESGCM(key32, key16)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 200 {
				text := fmt.Sprint(g, i)
				sealed, err := c.Seal([]byte(text), []byte(text))
				if !assert.NoError(t, err) {
					return
				}
				plain, err := c.Open(sealed, []byte(text))
				if !assert.NoError(t, err) || !assert.Equal(t, text, string(plain)) {
					return
				}
			}
		})
	}
	wg.Wait()
}

// Nothing that is not sealed by these keys opens, and nothing panics.
func FuzzAESGCM_open(f *testing.F) {
	c := AESGCM(key32, key16)
	sealed := mustSeal(f, c, "plain", "lease")
	for _, seed := range [][]byte{nil, {1}, sealed, sealed[:sealOverhead], mustSeal(f, AESGCM(key24), "", ""), bytes.Repeat([]byte{1}, 40)} {
		f.Add(seed, []byte("other"))
	}
	f.Fuzz(func(t *testing.T, text, context []byte) {
		if plain, err := c.Open(text, context); err == nil {
			t.Errorf("% x opened to %q", text, plain)
		}
		again, err := c.Open(mustSeal(t, c, string(text), string(context)), context)
		require.NoError(t, err)
		require.True(t, bytes.Equal(text, again))
	})
}

func BenchmarkAESGCM_seal(b *testing.B) {
	c, plain, context := AESGCM(key32), make([]byte, 1<<10), []byte("host:123-abc/17")
	b.SetBytes(int64(len(plain)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Seal(plain, context); err != nil {
			b.Fatal(err)
		}
	}
}
