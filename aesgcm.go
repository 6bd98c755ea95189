package recovery

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/sha256"
	"errors"
	"fmt"
)

// What AESGCM writes. Its first byte is its version, as with records.
//
//	byte       sealVersion
//	4 bytes    key id: the beginning of SHA-256(sealKeyDomain, key)
//	12 bytes   nonce, random
//	bytes      ciphertext
//	16 bytes   tag, over the ciphertext and the context
//
// The id is not authenticated, and need not be: another version or id finds no key, or one under which the tag is wrong.
const (
	sealVersion   = 1
	sealKeyID     = 4
	sealHeader    = 1 + sealKeyID
	sealOverhead  = sealHeader + 12 + 16
	sealKeyDomain = "github.com/crashsafe/recovery AESGCM key id\x00"
)

// AESGCM returns a Codec that seals by AES-GCM, under keys of 16, 24 or 32 random bytes (AES-128, AES-192, AES-256). The first key
// seals; all of them open. What is sealed can neither be read nor changed unnoticed, and opens for its own lease only: somebody
// who can write to Redis can't swap records. Sizes, times and what Codec leaves open (job ID, queue) stay readable.
//
// To change keys without losing a job, deploy three times, to the whole fleet and to its Inspectors:
//
//	AESGCM(old, new)    every worker can open what will be sealed under new
//	AESGCM(new, old)    new seals
//	AESGCM(new)         when nothing is left that old sealed: jobs that have been in flight since before the second step
//	                    (RecoveryWindow is a generous wait), and dead letters
//
// A record whose key is missing is not lost: Open names the key's id, the record goes to the dead letters as it is.
//
// Nonces are random, which is safe for 2^32 seals under one key, by the whole fleet together: 49 days at 1,000 seals a second.
// Each record, checkpoint and stored payload is one. Change keys before that.
//
// A bad key is reported by New, and by Seal and Open. AESGCM keeps no reference to keys. The Codec is safe for concurrent use.
func AESGCM(keys ...[]byte) Codec {
	c := &aesGCM{}
	var p problems
	if len(keys) == 0 {
		p.addf("Codec: AESGCM has no key, needs at least 1")
	}
	for i, key := range keys {
		if first := indexOf(keys[:i], key); first >= 0 {
			p.addf("Codec: AESGCM key %d is the same as key %d", i+1, first+1)
			continue
		}
		switch len(key) {
		case 16, 24, 32:
		default:
			p.addf("Codec: AESGCM key %d has %d bytes, must have 16, 24 or 32", i+1, len(key))
			continue
		}
		k, err := newSealKey(key)
		if err != nil {
			p.addf("Codec: AESGCM key %d: %w", i+1, err)
			continue
		}
		c.keys = append(c.keys, k)
	}
	c.err = errors.Join(p...)
	return c
}

// aesGCM is fixed after AESGCM.
type aesGCM struct {
	keys []sealKey
	err  error // what is wrong with the keys
}

// sealKey is a key as it is used. The bytes of the key are not kept: they can't be logged by accident.
type sealKey struct {
	id   [sealKeyID]byte
	aead cipher.AEAD
}

func newSealKey(key []byte) (k sealKey, err error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return k, err
	}
	// Not NewGCM: this one draws the nonce itself, and puts it first, so that no mistake of ours can use one twice.
	k.aead, err = cipher.NewGCMWithRandomNonce(block)
	sum := sha256.Sum256(append([]byte(sealKeyDomain), key...))
	copy(k.id[:], sum[:])
	return k, err
}

// validate is called by New.
func (c *aesGCM) validate() error { return c.err }

// Seal implements Codec.
func (c *aesGCM) Seal(plain, context []byte) ([]byte, error) {
	if c.err != nil {
		return nil, c.err
	}
	k := c.keys[0]
	b := make([]byte, 0, sealOverhead+len(plain))
	b = append(b, sealVersion)
	b = append(b, k.id[:]...)
	return k.aead.Seal(b, nil, plain, context), nil
}

// Open implements Codec.
func (c *aesGCM) Open(sealed, context []byte) ([]byte, error) {
	switch {
	case c.err != nil:
		return nil, c.err
	case len(sealed) > 0 && sealed[0] != sealVersion:
		return nil, fmt.Errorf("AESGCM: sealed by version %d, this program knows %d", sealed[0], sealVersion)
	case len(sealed) < sealOverhead:
		return nil, fmt.Errorf("AESGCM: cut short: %d bytes, at least %d", len(sealed), sealOverhead)
	}
	id, known := [sealKeyID]byte(sealed[1:sealHeader]), false
	for _, k := range c.keys {
		if k.id != id {
			continue
		}
		if plain, err := k.aead.Open(nil, nil, sealed[sealHeader:], context); err == nil {
			return plain, nil
		}
		known = true // go on: of four billion pairs of keys, one shares an id
	}
	if !known {
		return nil, fmt.Errorf("AESGCM: sealed under key %x, which is not configured", id)
	}
	return nil, fmt.Errorf("AESGCM: does not open under key %x: changed or cut short, or sealed for another context than %q", id, context)
}

// indexOf is where key is among keys, or -1.
func indexOf(keys [][]byte, key []byte) int {
	for i, k := range keys {
		if bytes.Equal(k, key) {
			return i
		}
	}
	return -1
}
