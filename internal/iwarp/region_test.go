package iwarp

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

func TestAnSTagIsNotUsedAgainSoon(t *testing.T) {
	p, seen := &pd{}, map[uint32]bool{0: true}
	for range 256 {
		m, err := p.RegMR(make([]byte, 1), localOnly)
		require.NoError(t, err)
		require.Equal(t, m.LKey(), m.RKey())
		require.False(t, seen[m.RKey()])
		seen[m.RKey()] = true
		require.NoError(t, m.Dereg())
		require.Nil(t, regions.get(m.RKey()))
	}
}

func TestRegionsComeAndGoConcurrently(t *testing.T) {
	p := &pd{}
	var running sync.WaitGroup
	for range 4 {
		running.Go(func() {
			for range 500 {
				mem := make([]byte, 8)
				m, err := p.RegMR(mem, remoteBoth)
				if err != nil {
					t.Error(err)
					return
				}
				refusal := p.remote(m.RKey(), addressOf(mem), 8, verbs.AccessRemoteWrite, func(mem []byte) { mem[7] = 1 })
				if refusal != noRefusal || mem[7] != 1 || !p.covers(verbs.SGE{Data: mem, LKey: m.LKey()}, localOnly) {
					t.Error("a region is not to be found")
				}
				p.remote(m.RKey()+256, 0, 1, verbs.AccessRemoteRead, func([]byte) {}) // whoever's that is
				if m.Dereg() != nil {
					t.Error("a region can't be deregistered")
				}
			}
		})
	}
	running.Wait()
}

func TestDeregistrationWaitsForACopy(t *testing.T) {
	p := &pd{}
	mem := make([]byte, 8)
	m := regMR(t, p, mem, remoteRead)
	copied := false
	done := make(chan struct{})
	p.remote(m.RKey(), addressOf(mem), 8, remoteRead, func([]byte) {
		go func() {
			defer close(done)
			m.Dereg()
			if !copied {
				t.Error("the memory is still in use")
			}
		}()
		eventually(t, "an invalid STag", func() bool { return regions.get(m.RKey()) == nil })
		copied = true // the race detector looks on
	})
	<-done
}

func TestPlacesRunOut(t *testing.T) {
	var table regionTable
	table.first, table.used = maxPlaces-3, maxPlaces-2
	m := &mr{}
	require.NoError(t, table.add(m))
	require.NotZero(t, m.stag>>8)
	require.ErrorContains(t, table.add(&mr{}), "memory regions")
	require.True(t, table.remove(m))
	require.False(t, table.remove(m))
	again := &mr{}
	require.NoError(t, table.add(again))
	require.Equal(t, m.stag>>8, again.stag>>8)
	require.NotEqual(t, m.stag, again.stag)
}
