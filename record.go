package recovery

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"
)

// A record is what Redis keeps of a job. Its first byte is its version; a reader that does not know the version must
// not guess, and must not delete.
//
//	byte     recordVersion
//	byte     flags: flagSealed, flagStored
//	string   job ID       (strings and byte strings: uvarint length, then the bytes)
//	string   queue
//	varint   timeout, ms; -1 none; 0 as configured
//	varint   max recoveries; -1 none; 0 as configured
//	bytes    body, sealed if there is a Codec: uvarint number of headers, their strings; uvarint 0, or the length of a checkpoint + 1 and
//	         the checkpoint; then the payload to the end, or nothing if it lies in the PayloadStore under the lease's ID
//
// ID and queue stay readable in a sealed record, so that a record which can't be opened can still be named to a person.
//
// A job that Fetch took from a list is kept as it was found there. With flagElement there is no more than
//
//	byte     recordVersion
//	byte     flagElement
//	string   key of the list
//	byte     the end from which it is consumed: L or R
//	bytes    the element, to the end
const (
	recordVersion = 1
	flagSealed    = 1 << 0
	flagStored    = 1 << 1
	flagElement   = 1 << 2
)

var errTruncated = errors.New("record is cut short")

// encodeRecord writes job as it is kept in Redis. lease is bound to the sealed body, so that records can't be swapped.
func encodeRecord(job *Job, lease string, codec Codec, stored bool) ([]byte, error) {
	if stored {
		short := *job
		short.Payload = nil
		job = &short
	}
	size := 2 + len(job.ID) + len(job.Queue) + len(job.Payload) + len(job.Checkpoint) + 5*binary.MaxVarintLen32
	for k, v := range job.Headers {
		size += len(k) + len(v) + 2*binary.MaxVarintLen32
	}
	var flags byte
	if codec != nil {
		flags |= flagSealed
	}
	if stored {
		flags |= flagStored
	}
	b := make([]byte, 0, size)
	b = append(b, recordVersion, flags)
	b = appendString(b, job.ID)
	b = appendString(b, job.Queue)
	b = binary.AppendVarint(b, timeoutToMS(job.Timeout))
	b = binary.AppendVarint(b, int64(job.MaxRecoveries))
	if codec == nil {
		return appendBody(b, job), nil
	}
	sealed, err := seal(appendBody(nil, job), []byte(lease), codec)
	if err != nil {
		return nil, err
	}
	return append(b, sealed...), nil
}

// seal guards against a Codec that panics.
func seal(plain, context []byte, codec Codec) (sealed []byte, err error) {
	perr := guard(func() { sealed, err = codec.Seal(plain, context) })
	if err = errors.Join(err, perr); err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}
	return sealed, nil
}

func appendBody(b []byte, job *Job) []byte {
	b = binary.AppendUvarint(b, uint64(len(job.Headers)))
	for k, v := range job.Headers {
		b = appendString(appendString(b, k), v)
	}
	if job.Checkpoint == nil {
		b = append(b, 0)
	} else {
		b = append(binary.AppendUvarint(b, uint64(len(job.Checkpoint))+1), job.Checkpoint...)
	}
	return append(b, job.Payload...)
}

// decodeRecord reads a record. What could be read is in the job even if there is an error.
func decodeRecord(raw []byte, lease string, codec Codec) (job Job, err error) {
	if len(raw) < 2 {
		return job, errTruncated
	}
	if raw[0] != recordVersion {
		return job, fmt.Errorf("record has version %d, this program knows %d", raw[0], recordVersion)
	}
	flags := raw[1]
	if flags == flagElement {
		e, err := parseElement(raw)
		return e.job(), err
	}
	if flags&^(flagSealed|flagStored) != 0 {
		return job, fmt.Errorf("record has unknown flags %#x", flags)
	}
	d := decoder{rest: raw[2:]}
	job.ID = d.string()
	job.Queue = d.string()
	timeout, limit := d.varint(), d.varint()
	if d.err != nil {
		return job, d.err
	}
	if timeout > maxInterval.Milliseconds() || limit > math.MaxInt32 || limit < NoLimit {
		return job, fmt.Errorf("record has timeout %d ms and limit %d, which nobody can have written", timeout, limit)
	}
	job.Timeout = timeoutFromMS(timeout)
	job.MaxRecoveries = int(limit)
	body := d.rest
	if flags&flagSealed != 0 {
		if codec == nil {
			return job, errors.New("record is sealed and there is no Codec")
		}
		if body, err = openSealed(body, []byte(lease), codec); err != nil {
			return job, err
		}
	}
	return job, decodeBody(body, &job)
}

// openSealed guards against a Codec that panics on bytes it never wrote.
func openSealed(sealed, context []byte, codec Codec) (plain []byte, err error) {
	perr := guard(func() { plain, err = codec.Open(sealed, context) })
	if err = errors.Join(err, perr); err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	return plain, nil
}

func decodeBody(body []byte, job *Job) error {
	d := decoder{rest: body}
	n := d.uvarint()
	if n > uint64(len(d.rest))/2 {
		return errTruncated
	}
	for ; n > 0 && d.err == nil; n-- {
		if job.Headers == nil {
			job.Headers = make(map[string]string, n)
		}
		k := d.string()
		job.Headers[k] = d.string()
	}
	if n := d.uvarint(); n > 0 {
		if d.err != nil || n-1 > uint64(len(d.rest)) {
			return errTruncated
		}
		job.Checkpoint = append([]byte{}, d.rest[:n-1]...)
		d.rest = d.rest[n-1:]
	}
	if d.err != nil {
		return d.err
	}
	job.Payload = append([]byte{}, d.rest...)
	return nil
}

// isStored reports whether the payload lies in the PayloadStore.
func isStored(raw []byte) bool {
	return len(raw) >= 2 && raw[0] == recordVersion && raw[1]&flagStored != 0
}

func timeoutToMS(d time.Duration) int64 {
	if d == NoTimeout {
		return -1
	}
	return ms(d)
}

func timeoutFromMS(v int64) time.Duration {
	if v < 0 {
		return NoTimeout
	}
	return time.Duration(v) * time.Millisecond
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// decoder reads fields until one does not fit; then err is set and everything after reads as zero.
type decoder struct {
	rest []byte
	err  error
}

func (d *decoder) string() string {
	n := d.uvarint()
	if d.err != nil || n > uint64(len(d.rest)) {
		d.err = errTruncated
		return ""
	}
	s := string(d.rest[:n])
	d.rest = d.rest[n:]
	return s
}

func (d *decoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.rest)
	d.skip(n)
	return v
}

func (d *decoder) varint() int64 {
	v, n := binary.Varint(d.rest)
	d.skip(n)
	return v
}

func (d *decoder) skip(n int) {
	if n <= 0 || d.err != nil {
		d.err, d.rest = errTruncated, nil
		return
	}
	d.rest = d.rest[n:]
}

// validate refuses what can't be recorded. It never looks at the contents of ID or payload: any byte is allowed.
func (j *Job) validate(maxPayload int) error {
	headers := 0
	for k, v := range j.Headers {
		headers += len(k) + len(v)
	}
	switch {
	case j.ID == "":
		return fmt.Errorf("%w: ID is empty", ErrInvalidJob)
	case len(j.ID) > maxJobID:
		return fmt.Errorf("%w: ID has %d bytes, at most %d", ErrInvalidJob, len(j.ID), maxJobID)
	case len(j.Queue) > maxJobID:
		return fmt.Errorf("%w: Queue of job %q has %d bytes, at most %d", ErrInvalidJob, j.ID, len(j.Queue), maxJobID)
	case headers > maxHeaders:
		return fmt.Errorf("%w: Headers of job %q have %d bytes, at most %d", ErrInvalidJob, j.ID, headers, maxHeaders)
	case j.Timeout < 0 && j.Timeout != NoTimeout, j.Timeout > 0 && j.Timeout < minInterval, j.Timeout > maxInterval:
		return fmt.Errorf("%w: Timeout of job %q is %v, from %v to %v, or 0 as configured, or NoTimeout", ErrInvalidJob, j.ID, j.Timeout, minInterval, maxInterval)
	case j.MaxRecoveries < NoLimit, j.MaxRecoveries > math.MaxInt32:
		return fmt.Errorf("%w: MaxRecoveries of job %q is %d, from 0 to %d, or NoLimit", ErrInvalidJob, j.ID, j.MaxRecoveries, math.MaxInt32)
	case len(j.Checkpoint) > maxPayload:
		return fmt.Errorf("%w: checkpoint of job %q has %d bytes, Config.MaxPayload is %d", ErrPayloadTooLarge, j.ID, len(j.Checkpoint), maxPayload)
	case len(j.Payload) > maxPayload:
		return fmt.Errorf("%w: job %q has %d bytes, Config.MaxPayload is %d", ErrPayloadTooLarge, j.ID, len(j.Payload), maxPayload)
	}
	return nil
}
