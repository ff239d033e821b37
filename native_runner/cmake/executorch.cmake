# Finds ExecuTorch and sets:
#
#   FARM_EXECUTORCH_COMPONENTS  libraries that the runner links
#   FARM_EXECUTORCH_VERSION     its own version
#
# There are two kinds of package. The package of the Python wheel has shared libraries as executorch::NAME. The
# install prefix of an ExecuTorch build, the only kind for Android, has static libraries as NAME.
find_package(executorch REQUIRED)

# The wheel's package adds its own folder to the search path of each linked program. A runner must find its
# libraries beside it only: a device has no such folder, and here the folder would hide that a file was not pushed.
function(farm_drop_rpath target)
  get_target_property(options ${target} INTERFACE_LINK_OPTIONS)
  if(options)
    list(FILTER options EXCLUDE REGEX "-rpath,")
    set_target_properties(${target} PROPERTIES INTERFACE_LINK_OPTIONS "${options}")
  endif()
endfunction()

if(TARGET executorch::runtime)
  set(prefix executorch::)
  set(needed runtime etdump)
  set(wanted threadpool kernels_optimized kernels_quantized backend_qnn backend_xnnpack)
elseif(TARGET executorch)
  set(prefix)
  set(needed executorch extension_module_static extension_data_loader extension_tensor etdump)
  set(wanted extension_flat_tensor extension_threadpool quantized_ops_lib qnn_executorch_backend xnnpack_backend)
  # Link either library: both register the same operators, which would end the process at its start.
  if(TARGET optimized_native_cpu_ops_lib)
    list(APPEND wanted optimized_native_cpu_ops_lib)
  else()
    list(APPEND needed portable_ops_lib)
  endif()
else()
  message(FATAL_ERROR "${executorch_DIR}: this executorch package has no C++ runtime")
endif()

set(FARM_EXECUTORCH_COMPONENTS)
foreach(name IN LISTS needed wanted)
  if(TARGET ${prefix}${name})
    list(APPEND FARM_EXECUTORCH_COMPONENTS ${prefix}${name})
    if(prefix)
      farm_drop_rpath(${prefix}${name})
    endif()
  elseif(name IN_LIST needed)
    message(FATAL_ERROR "farm_runner needs ${prefix}${name}, which this executorch package does not have")
  else()
    message(STATUS "farm_runner: this executorch package has no ${name}")
  endif()
endforeach()

if(NOT prefix)
  add_library(farm_executorch_prefix INTERFACE)
  # The linker would leave out unreferenced objects, such as kernels and backends that register themselves.
  # ExecuTorch's own package may have this option already; a second one is harmless.
  set(registering optimized_native_cpu_ops_lib portable_ops_lib quantized_ops_lib qnn_executorch_backend xnnpack_backend)
  foreach(name IN LISTS registering)
    if(name IN_LIST FARM_EXECUTORCH_COMPONENTS)
      get_target_property(type ${name} TYPE)
      get_target_property(options ${name} INTERFACE_LINK_OPTIONS)
      if(type STREQUAL "SHARED_LIBRARY")
        set(keep --no-as-needed)
      else()
        set(keep --whole-archive)
      endif()
      if(NOT options MATCHES "whole-archive")
        target_link_options(
          farm_executorch_prefix INTERFACE "LINKER:--push-state,${keep},$<TARGET_FILE:${name}>,--pop-state"
        )
      endif()
    endif()
  endforeach()
  # The prefix has no headers of the profiler: headers of the wheel of the same version are searched last.
  set(FARM_EXECUTORCH_HEADERS "" CACHE PATH "include/ of an executorch wheel, for headers that a prefix lacks")
  target_compile_definitions(farm_executorch_prefix INTERFACE ET_EVENT_TRACER_ENABLED C10_USING_CUSTOM_GENERATED_MACROS)
  target_include_directories(farm_executorch_prefix SYSTEM INTERFACE ${EXECUTORCH_INCLUDE_DIRS})
  if(FARM_EXECUTORCH_HEADERS)
    # -idirafter: searched after all other folders.
    target_compile_options(farm_executorch_prefix INTERFACE "SHELL:-idirafter \"${FARM_EXECUTORCH_HEADERS}\"")
  endif()
  list(APPEND FARM_EXECUTORCH_COMPONENTS farm_executorch_prefix)
endif()

# The runner frees its options before a method loads. An ExecuTorch without this accessor keeps a pointer to the
# caller's options instead of a copy.
set(FARM_MODULE_HEADER extension/module/module.h)
set(copies)
foreach(folder IN LISTS EXECUTORCH_INCLUDE_DIRS FARM_EXECUTORCH_HEADERS)
  if(EXISTS "${folder}/executorch/${FARM_MODULE_HEADER}")
    file(STRINGS "${folder}/executorch/${FARM_MODULE_HEADER}" copies REGEX "LoadBackendOptionsMap& backend_options\\(\\) const")
    break()
  endif()
endforeach()
if(NOT copies)
  message(FATAL_ERROR "${executorch_DIR}: Module::load of this ExecuTorch does not copy the options of backends "
                      "(${FARM_MODULE_HEADER} has no backend_options()): use ExecuTorch 1.5 or newer")
endif()

set(FARM_EXECUTORCH_VERSION "${EXECUTORCH_BUILD_VERSION}")
if(NOT FARM_EXECUTORCH_VERSION)
  set(FARM_EXECUTORCH_VERSION "${executorch_VERSION}")
endif()
if(NOT FARM_EXECUTORCH_VERSION)
  set(FARM_EXECUTORCH_VERSION unknown)
endif()
